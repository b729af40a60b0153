"""Plots along an order, the depth of a model or the steps of a loop: panels above each other that share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from samebits.report.plots.style import COLUMN, GRID, LOOK, SOFT, STYLE, TEXT, Panel, legend_height, legends, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 1.1
"""Inches of a panel."""
NARROW = 26
"""So many names stand beside each other in a column."""


def along_depth(names: Sequence[str], panels: Sequence[Panel]) -> Figure:
    """Every place by its name; points, because what lies between two places is nothing."""
    return _draw(names, panels, "", 0.055 * max(map(len, names)))


def along_steps(steps: Sequence[str], panels: Sequence[Panel]) -> Figure:
    return _draw(steps, panels, "step", 0.0)


def _draw(positions: Sequence[str], panels: Sequence[Panel], title: str, upright: float) -> Figure:
    """``upright``: inches of the names at the bottom that stand upright; 0: they do not."""
    import matplotlib
    from matplotlib.figure import Figure as Made

    width = COLUMN if len(positions) <= NARROW else TEXT
    height = (HEIGHT + legend_height(panels)) * len(panels) + (upright or 0.35)
    with matplotlib.rc_context(STYLE):
        figure = Made(figsize=(width, height), layout="constrained")
        for axes, panel in zip(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True):
            _panel(axes, panel, joined=not upright)
        legends(figure, panels)
        last = figure.axes[-1]
        last.set_xticks(range(len(positions)), positions, rotation=90 if upright else 0)
        last.set_xlim(-0.6, len(positions) - 0.4)
        last.set_xlabel(title)
        figure.align_ylabels()
    return figure


def _panel(axes: Axes, panel: Panel, joined: bool) -> None:
    along = scale(panel)
    for place in along.grid:
        axes.axhline(place, color=GRID, linewidth=0.5, zorder=1)
    for place in along.breaks:
        axes.axhline(place, color=SOFT, linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
    for series in panel.series:
        up = [math.nan if value is None else along.place(value) for (value,) in series.values]
        axes.plot(up, linewidth=0.6 * joined, label=series.label, clip_on=False, **LOOK[series.kind])
    axes.set_ylim(*along.limits)
    axes.set_yticks(list(along.ticks), list(along.ticks.values()))
    axes.set_ylabel(panel.title)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
