"""Small figures drawn as SVG by our own code, inside the page: no script, no library, colours from the page's style."""

from __future__ import annotations

from html import escape
from typing import Any

from samebits.report.decades import Decades
from samebits.report.parts import Figure, State

ROW, TOP, LEFT, PLOT = 20, 28, 150, 300
_CHIP = 76
_BAR, _LABEL = 6, 70
LATENCY_NOTE = (
    "the peer by its own operations one by one; times of a replay are for orientation, "
    "python -m samebits.models.minimax_h3.block_bench and samebits bench are the benchmarks"
)


def node_figure(case: dict[str, Any]) -> Figure:
    """The stages of a replay from top to bottom: whose bits they have, whether rows hold, how far both are from the golden."""
    stages = case["stages"]
    scale = Decades.over([entry[who]["relative"] for entry in stages for who in ("error", "peer_error")], whole=True)
    height = TOP + ROW * len(stages) + 8
    parts = [_text(LEFT - 8, 16, "stage", "end"), _text(LEFT + 4, 16, "bits"), _text(LEFT + _CHIP + 4, 16, "rows")]
    plot = LEFT + 2 * _CHIP + 12
    for power in range(round(scale.low), round(scale.high) + 1):
        x = plot + (power - scale.low) / scale.span * PLOT
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 6}" class="grid"/>')
        parts.append(_text(x, 16, f"1e{power}", "middle"))
    for place, entry in enumerate(stages):
        y = TOP + ROW * place + ROW / 2
        parts.append(_text(LEFT - 8, y + 4, entry["name"], "end"))
        parts += _chip(LEFT, y, "same" if entry["isolated"]["same"] else "differ", _bits(entry))
        parts += _chip(LEFT + _CHIP, y, "hold" if not entry["rows"]["varying"] else "vary", _rows(entry))
        for who, kind in (("peer_error", "peer"), ("error", "ours")):
            if entry[who]["relative"] is not None:
                x = plot + max(scale.at(entry[who]["relative"]), 0) / scale.span * PLOT
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if kind == "peer" else 3.5}" class="{kind}"/>')
    title = f"Stages, {case['title']}"
    words = escape(f"{title}: agreement with the peer's bits, invariance of rows, and relative error of each stage")
    svg = (
        f'<svg class="nodes" viewBox="0 0 {plot + PLOT + 20} {height}" role="img" aria-label="{words}">'
        f"{''.join(parts)}</svg>"
    )
    caption = (
        "bits: beside the peer, fed by it; rows: alone, in part, beside a second sequence; right: error over the golden's largest, "
        "on a logarithmic scale, ours filled, the peer's as a ring"
    )
    return Figure(title, caption, svg)


def latency_figure(case: dict[str, Any]) -> Figure:
    """Two bars for each stage from top to bottom, ours above the peer's, on a linear scale: where the time of the chain goes."""
    stages = case["stages"]
    times = [entry["latency_us"] for entry in stages]
    longest = max(found[who] or 0.0 for found in times for who in ("ours", "peer")) or 1.0
    height = TOP + ROW * len(stages) + 8
    plot = LEFT + 4
    parts = [_text(LEFT - 8, 16, "stage", "end"), _text(plot, 16, "us of one call: ours, filled, and the peer's")]
    for place, (entry, found) in enumerate(zip(stages, times, strict=True)):
        y = TOP + ROW * place + ROW / 2
        parts.append(_text(LEFT - 8, y + 4, entry["name"], "end"))
        for who, top in (("ours", y - _BAR - 1), ("peer", y + 1)):
            if found[who] is not None:
                width = max(found[who] / longest * PLOT, 0.5)
                parts.append(f'<rect x="{plot}" y="{top:.1f}" width="{width:.1f}" height="{_BAR}" class="{who}"/>')
        shown = " / ".join("-" if found[who] is None else f"{found[who]:,.1f}" for who in ("ours", "peer"))
        end = max(found[who] or 0.0 for who in ("ours", "peer")) / longest * PLOT
        parts.append(_text(plot + end + 8, y + 4, shown))
    title = f"Latency, {case['title']}"
    words = escape(f"{title}: microseconds of one call of each stage, ours and the peer's")
    svg = (
        f'<svg class="nodes" viewBox="0 0 {plot + PLOT + 2 * _LABEL + 20} {height}" role="img" aria-label="{words}">'
        f"{''.join(parts)}</svg>"
    )
    ways = "; ".join(dict.fromkeys(found["how"] for found in times))
    return Figure(title, f"us of one forward call, ours / the peer's, isolated: medians of {ways}; {LATENCY_NOTE}", svg)


def _bits(entry: dict[str, Any]) -> State:
    if entry["isolated"]["same"]:
        return "good"
    return "bad" if entry["promised"] and not entry["stand_in"] else "none"


def _rows(entry: dict[str, Any]) -> State:
    if not entry["rows"]["varying"]:
        return "good"
    return "none" if entry["stand_in"] else "bad"


def _chip(x: float, y: float, word: str, state: State) -> list[str]:
    box = f'<rect x="{x}" y="{y - 8:.1f}" width="{_CHIP - 8}" height="16" rx="8" class="chip {state}"/>'
    return [box, _text(x + (_CHIP - 8) / 2, y + 4, word, "middle")]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
