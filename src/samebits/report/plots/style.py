"""What the figures for print share: fonts, markers, axes, and bytes that repeat.

Series differ in shape and filling as well as in colour (three of Okabe and Ito's, which the colour-blind tell apart), and a
figure is as wide as a column, so that it is printed at its own size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from samebits.report.decades import Decades

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
COLUMN, TEXT = 3.4, 7.0
"""Inches: the width of a column, and of a page of two."""
SIZE = 7
DPI = 300

Kind = Literal["ours", "third", "peer", "unsteady", "isolated", "chained"]
"""``unsteady``: the peer, where it does not repeat its own bits."""
_BLUE, _RED, _GREEN, DARK, SOFT = "#0072B2", "#D55E00", "#009E73", "#222222", "#5F6670"
GRID, BAND = "#DDE1E6", "#F4F5F7"
_HOLLOW = {"markerfacecolor": "none", "markeredgewidth": 0.9}
LOOK: dict[Kind, dict[str, Any]] = {
    "peer": {"color": _RED, "marker": "o", "markersize": 4.6, **_HOLLOW},
    "unsteady": {"color": _RED, "marker": "x", "markersize": 4.4, "markeredgewidth": 0.9, "zorder": 3},
    "third": {"color": _GREEN, "marker": "D", "markersize": 2.6},
    "ours": {"color": _BLUE, "marker": "o", "markersize": 2.8},
    "chained": {"color": DARK, "marker": "s", "markersize": 4.2, **_HOLLOW},
    "isolated": {"color": DARK, "marker": "D", "markersize": 2.4},
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": SIZE,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.width": 0.6,
    "ytick.major.size": 2.5,
    "figure.constrained_layout.w_pad": 0.02,
    "figure.constrained_layout.h_pad": 0.02,
    "figure.constrained_layout.wspace": 0.03,
    "figure.constrained_layout.hspace": 0.03,
    "pdf.fonttype": 42,
    "svg.hashsalt": "samebits",
}


@dataclass(frozen=True)
class Series:
    """What one marker shows: a value for every row and case. None: not measured; infinite: not finite."""

    kind: Kind
    label: str
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Panel:
    """``share``: of all, logarithmic, from one element to everything. ``part``: of all, linear. ``error``: logarithmic."""

    axis: Literal["share", "part", "error"]
    title: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Scale:
    """Places along an axis."""

    place: Callable[[float], float]
    limits: tuple[float, float]
    ticks: dict[float, str]
    grid: Sequence[float]
    breaks: Sequence[float]
    """Where the axis is broken, beside zero and beside what is not finite."""


def scale(panel: Panel) -> Scale:
    """The axis on which all values of a panel have a place."""
    if panel.axis == "part":
        return Scale(float, (-0.06, 1.06), {0: "0", 0.5: "50%", 1: "100%"}, (0.5, 1), ())
    values = [value for series in panel.series for found in series.values for value in found]
    decades = Decades.over(values, high=0 if panel.axis == "share" else None)
    marks = {decades.at(value): label for value, label in decades.ticks().items()}
    ticks, breaks = dict(marks), []
    low, high = -0.04 * decades.span, 1.04 * decades.span
    if panel.axis == "share" or 0 in values:
        zero = decades.at(0.0)
        ticks[zero] = "0"
        low = 1.5 * zero
        breaks.append(zero / 2)
    if math.inf in values:
        infinite = decades.at(math.inf)
        ticks[infinite] = "not\nfinite"
        high = infinite + 0.04 * decades.span
        breaks.append((infinite + decades.span) / 2)
    return Scale(decades.at, (low, high), ticks, tuple(marks), breaks)


def legends(figure: Figure, panels: Sequence[Panel]) -> None:
    """One above each panel that has more than one series; over the whole width where there is one panel alone."""
    shape: dict[str, Any] = {
        "ncols": 2, "frameon": False, "borderpad": 0.2, "borderaxespad": 0, "handletextpad": 0.3, "columnspacing": 0.9,
        "handlelength": 1.2, "labelspacing": 0.25,
    }  # fmt: skip
    for axes, panel in zip(figure.axes, panels, strict=True):
        if len(panels) == 1 and len(panel.series) > 2:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", **shape)
        elif len(panel.series) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), **shape)


def legend_height(panels: Sequence[Panel]) -> float:
    """Inches of the highest legend."""
    return max(0.14 * -(-len(panel.series) // 2) for panel in panels)


def encoded(figure: Figure, form: str) -> bytes:
    """The same figure gives the same bytes: nothing says when or by which release it was drawn."""
    import matplotlib

    stamps: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=form, dpi=DPI, metadata=stamps[form])
    return _few_colours(buffer) if form == "png" else buffer.getvalue()


def _few_colours(png: io.BytesIO) -> bytes:
    """A palette is enough for what is drawn here, and a third of the size."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(png) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True, dpi=(DPI, DPI))
    return buffer.getvalue()
