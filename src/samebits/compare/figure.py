"""A report as one picture: the verdicts as a matrix, the times as bars."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from samebits.bench.case import DIRECTIONS
from samebits.compare import show

_SHADES = {True: "#cfe8d5", False: "#f2c4bd", None: "#eeeeee"}
_WORDS = {True: "yes", False: "no", None: "-"}
_BARS = {"fwd": "#1b6ca8", "bwd": "#bb3e03", "fwd+bwd": "#7b2cbf"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG."""
    picture(report).savefig(path, format="png", dpi=130)


def picture(report: dict[str, Any]) -> Any:
    """What could not run is named below the matrix; what failed is in it, with the reason in place of verdicts."""
    from matplotlib.figure import Figure

    entries = show.ran(report)
    absent = [entry["name"] for entry in report["contestants"] if entry not in entries]
    timed = any("us" in t for entry in entries for t in entry["latency"])
    figure = Figure(figsize=(14 if timed else 8, 2.2 + 0.5 * len(entries)), layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True, width_ratios=[1.1, 1] if timed else [1])[
        0
    ]
    _matrix(panels[0], entries)
    if timed:
        _bars(panels[1], entries, show.largest(report))
    machine = report["environment"]["gpu"] if report["device"] != "cpu" else "CPU"
    sizes = ", ".join(f"{axis}={size}" for axis, size in report["sizes"].items())
    figure.suptitle(f"{report['op']}, {report['contract']} on {report['backend']} ({machine}, {sizes})", fontsize=12)
    if absent:
        text = textwrap.fill("not compared: " + "; ".join(absent), 170 if timed else 100)
        figure.supxlabel(text, fontsize=8, x=0.01, ha="left", color="#555555")
    return figure


def _matrix(panel: Any, entries: list[dict[str, Any]]) -> None:
    """A word in every cell, so that no verdict is a colour alone."""
    from matplotlib.patches import Rectangle

    columns = len(show.VERDICTS)
    for row, entry in enumerate(entries):
        if entry["invariance"] is None:
            panel.add_patch(Rectangle((0, row - 0.46), columns, 0.92, color=_SHADES[None]))
            words = f"{entry['status']}: {entry['reason']}"
            panel.text(0.1, row, words if len(words) < 66 else words[:63] + "...", va="center", fontsize=8)
            continue
        for column, verdict in enumerate(show.verdicts(entry).values()):
            panel.add_patch(Rectangle((column + 0.03, row - 0.46), 0.94, 0.92, color=_SHADES[verdict]))
            panel.text(column + 0.5, row, _WORDS[verdict], ha="center", va="center", fontsize=9)
    panel.set(xlim=(0, columns), ylim=(len(entries) - 0.5, -0.5))
    panel.set_xticks([column + 0.5 for column in range(columns)], show.VERDICTS, fontsize=9)
    panel.xaxis.tick_top()
    panel.set_yticks(range(len(entries)), [entry["name"] for entry in entries], fontsize=9)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _bars(panel: Any, entries: list[dict[str, Any]], rows: int) -> None:
    height, shown = 0.26, []
    for number, direction in enumerate(DIRECTIONS):
        places, widths = [], []
        for row, entry in enumerate(entries):
            found = show.timed(entry, direction, rows)
            if found is not None and "us" in found:
                places.append(row + (number - 1) * height)
                widths.append(found["us"])
        panel.barh(places, widths, height=height * 0.9, color=_BARS[direction], label=direction)
        for place, width in zip(places, widths, strict=True):
            panel.text(width, place, f" {width:,.1f}", va="center", fontsize=7)
        shown += widths
    panel.set(xscale="log", xlim=(min(shown) / 3, max(shown) * 2), xlabel=f"us, {rows:,} rows")
    panel.tick_params(axis="y", length=0)
    panel.grid(True, which="major", axis="x", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
