"""The findings as one self-contained HTML page: verdict, then every call in execution order, coloured by agreement."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from samebits.report import pages
from samebits.report.parts import State, Tile
from samebits.verify.drift.compare import DIFFERENT, JUDGEMENTS, Judged
from samebits.verify.drift.result import Drift, side
from samebits.verify.drift.show import lines
from samebits.verify.drift.tensors import Compared

_STATES: dict[str, State] = {"same": "good", "origin": "bad", "unclear": "bad", "carried": "none", "recovered": "none"}
_DEEPEST = 60
"""Nesting that the page shows; deeper calls stand beside each other."""


@dataclass
class Node:
    """One call, with the calls inside it."""

    name: str
    state: State
    judgement: str
    first: str
    """What it is the first of: "first drift", "first difference", or nothing."""
    anchor: str
    places: list[str]
    children: list[Node] = field(default_factory=list)
    open: bool = False
    """Something below differs, so it is shown unfolded."""


def render(drift: Drift) -> str:
    return pages.render(
        "drift.html.j2",
        tiles=_tiles(drift),
        text="\n".join(lines(drift)),
        sides={"A": _stamp(drift, "a"), "B": _stamp(drift, "b")},
        parameters=[_node(j) for j in drift.parameters if j.judgement != "same"],
        phases={phase: _forest(drift, judged, drift.first(phase)) for phase, judged in drift.phases.items()},
    )


def write(drift: Drift, path: Path) -> None:
    path.write_text(render(drift))


def _tiles(drift: Drift) -> list[Tile]:
    wrong = len(drift.differing_parameters)
    found = [
        Tile(
            "Parameters",
            f"{wrong} differ" if wrong else "agree",
            f"{len(drift.parameters)} versions of parameters and buffers",
            "bad" if wrong else "good",
            "parameters",
        )
    ]
    if drift.differing_inputs:
        found.append(Tile("Model inputs", "differ", drift.differing_inputs[0].name, "bad", "forward"))
    found += [_phase_tile(phase, judged, drift.first(phase)) for phase, judged in drift.phases.items()]
    return found


def _phase_tile(phase: str, judged: list[Judged], first: Judged | None) -> Tile:
    title = phase.capitalize()
    if first is not None:
        return Tile(title, _first(first), first.name, _STATES[first.judgement], _anchor(first))
    same = sum(j.judgement == "same" for j in judged)
    detail = f"{same} of {len(judged)} agree"
    return (
        Tile(title, "same bits", detail, "good", phase)
        if same
        else Tile(title, "not comparable", detail, "none", phase)
    )


def _first(judged: Judged) -> str:
    """A difference that came from elsewhere, from another forward say, is no drift of this call."""
    return "first drift" if judged.judgement in ("origin", "unclear") else "first difference"


def _anchor(judged: Judged) -> str:
    return f"first-{judged.event.phase}"


def _stamp(drift: Drift, name: str) -> dict[str, str]:
    about = side(drift.a if name == "a" else drift.b)
    return {"file": about["path"] or "in memory", "rank": f"{about['rank']} of {about['world_size']}"} | about[
        "environment"
    ]


def _forest(drift: Drift, judged: list[Judged], first: Judged | None) -> list[Node]:
    """Calls inside calls in the order in which they began. A backward has no nesting: its events are in the order of their ends."""
    nodes = [(j, _node(j, _first(j) if j is first else "")) for j in judged]
    if any(j.event.phase == "backward" for j in judged):
        return [node for _, node in nodes]
    homes: tuple[dict[int, Node], dict[int, Node]] = ({}, {})
    for j, node in nodes:
        for event, home in zip((j.a, j.b), homes, strict=True):
            if event is not None and event.depth < _DEEPEST:
                home[event.start] = node
    top: list[Node] = []
    for j, node in sorted(nodes, key=lambda entry: entry[0].event.start):
        home = homes[0] if j.a is not None else homes[1]
        parent = home.get(j.event.parent) if j.event.parent is not None else None
        (top if parent is None else parent.children).append(node)
    for node in top:
        _unfold(node)
    return top


def _unfold(node: Node) -> bool:
    below = [_unfold(child) for child in node.children]
    node.open = any(below)
    return node.open or node.judgement != JUDGEMENTS["same"]


def _node(judged: Judged, first: str = "") -> Node:
    places = [f"in {_place(p)}" for p in judged.inputs if p.verdict != "same"]
    places += [f"out {_place(p)}" for p in judged.outputs if p.verdict != "same"]
    state = _STATES.get(judged.judgement, "open")
    places += judged.notes if judged.judgement in DIFFERENT else []
    alone = judged.event.kind == "parameter" and judged.judgement in DIFFERENT  # it has no inputs to speak of
    judgement = "differs" if alone else JUDGEMENTS[judged.judgement]
    return Node(judged.name, state, judgement, first, _anchor(judged), places)


def _place(place: Compared) -> str:
    return f"{place.where}: {place.verdict}" + (f", {place.detail}" if place.detail else "")
