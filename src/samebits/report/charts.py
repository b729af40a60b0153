"""Time against rows: ours, the peers, and the floor that memory and an empty launch put under both."""

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
    """One chart per operator, a panel per direction, at the size that was measured at most row counts."""
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
    figure = Figure(figsize=(4.6 * len(directions), 3.9), layout="constrained")
    axes = figure.subplots(1, len(directions), squeeze=False)[0]
    for panel, direction in zip(axes, directions, strict=True):
        _panel(panel, direction, [line for line in chosen if line["direction"] == direction])
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    title = f"{op}, {', '.join(f'{axis}={size}' for axis, size in common)}: time against rows"
    return Chart(title, _svg(figure))


def _panel(panel: Any, direction: str, lines: Sequence[dict[str, Any]]) -> None:
    def by_rows(points: dict[int, float]) -> tuple[list[int], list[float]]:
        return sorted(points), [points[rows] for rows in sorted(points)]

    floor = {line["shape"]["T"]: floor_us(line) for line in lines}
    panel.plot(*by_rows(floor), color="#333333", linestyle=":", linewidth=1.5, label="floor")
    ours = dict.fromkeys((line["contract"], line["backend"]) for line in lines)
    for index, (contract, backend) in enumerate(ours):
        points = {m["shape"]["T"]: m["us"] for m in lines if (m["contract"], m["backend"]) == (contract, backend)}
        panel.plot(
            *by_rows(points),
            color=_COLOURS[index % len(_COLOURS)],
            marker="o",
            markersize=4,
            label=f"{contract} / {backend}",
        )
    for index, name in enumerate(dict.fromkeys(name for line in lines for name in line["peers"])):
        times = {line["shape"]["T"]: line["peers"][name]["us"] for line in lines if name in line["peers"]}
        shade = str(0.35 + 0.12 * (index % 4))
        panel.plot(
            *by_rows(times),
            color=shade,
            linestyle="--",
            marker="xs^v"[index % 4],
            markersize=4,
            linewidth=1,
            label=name,
        )
    panel.set(xscale="log", yscale="log", xlabel="rows T", title=direction)
    panel.set_xscale("log", base=2)
    panel.set_ylabel("microseconds")
    panel.grid(True, which="major", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _svg(figure: Any) -> str:
    """The same results give the same bytes, so a page that did not change does not show as a diff."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "samebits"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
