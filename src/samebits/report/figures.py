"""Small figures drawn as SVG by our own code, inside the page: no script, no library, colours from the page's style."""

from __future__ import annotations

from html import escape
from typing import Any

from samebits.report.decades import Decades
from samebits.report.parts import Figure, State

ROW, TOP, LEFT, PLOT = 20, 28, 150, 300
_CHIP = 76


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
