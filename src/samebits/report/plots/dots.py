"""Dot plots: one row per node, panels side by side that share the rows, a lane within the row for every case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from samebits.report.plots.style import (
    BAND,
    COLUMN,
    GRID,
    LOOK,
    SIZE,
    SOFT,
    STYLE,
    Panel,
    legend_height,
    legends,
    scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, LANE, LANES = 0.17, 0.072, 7
"""Inches: a row of one lane, and every further lane; more lanes than that lie closer."""


def draw(rows: Sequence[str], cases: Sequence[str], panels: Sequence[Panel], width: float = COLUMN) -> Figure:
    """A figure of ``panels``; every series has a value for each of ``rows`` and each of ``cases``."""
    import matplotlib
    from matplotlib.figure import Figure as Made

    further = min(len(cases), LANES) - 1
    height = ROW + LANE * further
    spread = LANE * further / height / max(len(cases) - 1, 1)
    crowded = min(1.0, math.sqrt(LANES / len(cases)))
    with matplotlib.rc_context(STYLE):
        figure = Made(
            figsize=(width, len(rows) * height + 0.45 + 0.12 * bool(further) + legend_height(panels)),
            layout="constrained",
        )
        for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
            _panel(axes, panel, rows, spread, crowded)
        legends(figure, panels)
        figure.axes[0].set_yticks(range(len(rows)), rows)
        figure.axes[0].set_ylim(len(rows) - 0.5, -0.5)
        figure.align_xlabels()
        if further:
            words = f"in each row, from the top: {_among(cases)}"
            figure.supxlabel(words, x=0.005, ha="left", size=SIZE - 1, color=SOFT)
    return figure


def _thing(row: str) -> str:
    """What a row belongs to: ``norm1: scale`` to ``norm1``."""
    return row.partition(":")[0]


def _among(cases: Sequence[str]) -> str:
    return "; ".join(cases) if len(cases) <= 3 else f"{len(cases)} cases, {cases[0]} to {cases[-1]}"


def _panel(axes: Axes, panel: Panel, rows: Sequence[str], spread: float, crowded: float) -> None:
    along = scale(panel)
    things = list(dict.fromkeys(_thing(row) for row in rows))
    for at, row in enumerate(rows):
        if things.index(_thing(row)) % 2 == 0:
            axes.axhspan(at - 0.5, at + 0.5, color=BAND, linewidth=0, zorder=0)
    for place in along.grid:
        axes.axvline(place, color=GRID, linewidth=0.5, zorder=1)
    for place in along.breaks:
        axes.axvline(place, color=SOFT, linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
    for series in panel.series:
        points = [
            (along.place(value), row + (lane - (len(found) - 1) / 2) * spread)
            for row, found in enumerate(series.values)
            for lane, value in enumerate(found)
            if value is not None
        ]
        across, down = zip(*points, strict=True) if points else ((), ())
        look = LOOK[series.kind]
        size = look["markersize"] * crowded
        axes.plot(across, down, linestyle="", label=series.label, clip_on=False, **look | {"markersize": size})
    axes.set_xlim(*along.limits)
    axes.set_xticks(list(along.ticks), list(along.ticks.values()))
    axes.set_xlabel(panel.title)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
