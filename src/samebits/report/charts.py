"""Time over the floor, per number of rows: ours beside the peers.

The floor is what memory and an empty launch allow. Bare times span four decades, in which everything near the floor
would be one line; the floor of each number of rows is written below it instead.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samebits.bench.targets import floor_us

_COLOURS = ("#1b6ca8", "#0a9396", "#7b2cbf", "#bb3e03", "#5c7c2f", "#a4133c")


@dataclass(frozen=True)
class Chart:
    title: str
    source: str
    """An SVG image as a data URI."""


def speed(lines: Sequence[dict[str, Any]]) -> tuple[Chart, ...]:
    """One chart per operator, a panel per direction, at the size that was measured most often."""
    measured = [line for line in lines if "skipped" not in line and "float32" not in line["dtype"]]
    return tuple(
        _operator(op, [m for m in measured if m["op"] == op]) for op in dict.fromkeys(m["op"] for m in measured)
    )


def _size(line: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((axis, size) for axis, size in line["shape"].items() if axis != "T")


def _operator(op: str, lines: Sequence[dict[str, Any]]) -> Chart:
    from matplotlib.figure import Figure

    sizes = [_size(line) for line in lines]
    common = max(dict.fromkeys(sizes), key=sizes.count)
    chosen = [line for line in lines if _size(line) == common]
    directions = [d for d in ("fwd", "bwd", "fwd+bwd") if any(line["direction"] == d for line in chosen)]
    counts = [len({line["shape"]["T"] for line in chosen if line["direction"] == d}) for d in directions]
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    widths = [max(count, 2) + 0.6 for count in counts]
    axes = figure.subplots(1, len(directions), squeeze=False, sharey=True, width_ratios=widths)[0]
    ours = list(dict.fromkeys((line["contract"], line["backend"]) for line in chosen))
    peers = list(dict.fromkeys(name for line in chosen for name in line["peers"]))
    for panel, direction in zip(axes, directions, strict=True):
        _panel(panel, direction, [line for line in chosen if line["direction"] == direction], ours, peers)
    axes[0].set_ylabel("time over the floor")
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    title = f"{op}, {', '.join(f'{axis}={size}' for axis, size in common)}: time over the floor"
    return Chart(title, _svg(figure))


def _panel(
    panel: Any, direction: str, lines: Sequence[dict[str, Any]], ours: list[tuple[str, str]], peers: list[str]
) -> None:
    """Points side by side within one number of rows, so that equal times do not hide each other."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    floor = {line["shape"]["T"]: floor_us(line) for line in lines}
    rows = sorted(floor)
    series = len(ours) + len(peers)

    def points(index: int, times: dict[int, float]) -> tuple[list[float], list[float]]:
        shift = (index - (series - 1) / 2) * 0.66 / max(series - 1, 1)
        found = [count for count in rows if count in times]
        return [rows.index(count) + shift for count in found], [times[count] / floor[count] for count in found]

    for index, (contract, backend) in enumerate(ours):
        times = {m["shape"]["T"]: m["us"] for m in lines if (m["contract"], m["backend"]) == (contract, backend)}
        colour = _COLOURS[index % len(_COLOURS)]
        label = f"{contract} / {backend}"
        panel.plot(*points(index, times), color=colour, marker="o", markersize=7, linestyle="", label=label)
    for index, name in enumerate(peers):
        times = {line["shape"]["T"]: line["peers"][name]["us"] for line in lines if name in line["peers"]}
        shade, mark = str(0.25 + 0.1 * (index % 4)), "xs^v"[index % 4]
        panel.plot(*points(len(ours) + index, times), color=shade, marker=mark, markersize=6, linestyle="", label=name)
    panel.axhline(1, color="#333333", linestyle=":", linewidth=1.5, label="floor")
    for position in range(1, len(rows)):
        panel.axvline(position - 0.5, color="#dddddd", linewidth=0.8)
    panel.set(yscale="log", title=direction, xlim=(-0.5, max(len(rows), 1) - 0.5))
    panel.set_xticks(
        range(len(rows)), [f"T = {count:,}\nfloor {_short(floor[count])} us" for count in rows], fontsize=9
    )
    panel.yaxis.set_major_locator(FixedLocator([0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500]))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    panel.tick_params(axis="x", length=0)
    panel.grid(True, which="major", axis="y", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _short(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _svg(figure: Any) -> str:
    """The same results give the same bytes, so a page that did not change does not show as a diff."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "samebits"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
