"""Two traces against each other: every event judged, and the first operation that made a difference."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from samebits.verify.drift.align import align
from samebits.verify.drift.tensors import Compared, Pair, compare
from samebits.verify.trace.events import PHASES, Event, Phase, TensorRecord

Judgement = Literal["same", "origin", "carried", "unclear", "recovered", "incomparable", "only_a", "only_b"]
JUDGEMENTS: dict[Judgement, str] = {
    "same": "inputs and outputs agree",
    "origin": "inputs agree, outputs differ",
    "carried": "inputs differ, outputs differ",
    "unclear": "outputs differ, not all inputs can be compared",
    "recovered": "inputs differ, outputs agree",
    "incomparable": "cannot be compared",
    "only_a": "only in A",
    "only_b": "only in B",
}
DIFFERENT = ("origin", "carried", "unclear", "recovered")


@dataclass
class Judged:
    """One event of either run, or of both."""

    a: Event | None
    b: Event | None
    judgement: Judgement
    inputs: list[Compared] = field(default_factory=list)
    outputs: list[Compared] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def event(self) -> Event:
        event = self.a if self.a is not None else self.b
        assert event is not None
        return event

    @property
    def inputs_agree(self) -> bool | None:
        return _all_agree(self.inputs)

    @property
    def name(self) -> str:
        event = self.event
        what = {"gradient": "gradient of ", "operator": "operator "}.get(event.kind, "")
        times = f", call {event.call}" if event.call else ""
        return f"{what}{event.path}" + (f" ({event.cls}{times})" if event.cls else times and f" ({times[2:]})")

    def to_json(self) -> dict[str, Any]:
        event = self.event
        return {
            "kind": event.kind,
            "phase": event.phase,
            "path": event.path,
            "class": event.cls,
            "call": event.call,
            "judgement": self.judgement,
            "inputs": [entry.to_json() for entry in self.inputs if entry.verdict != "same"],
            "outputs": [entry.to_json() for entry in self.outputs if entry.verdict != "same"],
            "notes": self.notes,
        }


def judge_phases(pair: Pair) -> dict[Phase, list[Judged]]:
    """Every phase that either run has. What a call's forward was given and made is an input of its backward."""
    wanted = [phase for phase in PHASES if pair.a.phase(phase) or pair.b.phase(phase)]
    judged = {phase: _judge_phase(pair, phase) for phase in wanted}
    before = {j.a.start: j for phase in wanted if phase != "backward" for j in judged[phase] if j.a is not None}
    for j in judged.get("backward", []):
        forward = before.get(j.a.parent) if j.a is not None and j.a.parent is not None else None
        if j.event.kind != "module" or j.b is None or forward is None:
            continue
        if forward.inputs_agree is False or _all_agree(forward.outputs) is False:
            j.inputs.append(Compared("forward", "bits", "the forward of this call differs already"))
            j.judgement = judge(False, _all_agree(j.outputs))
    _judge_parameter_gradients(judged.get("backward", []))
    return judged


def _judge_phase(pair: Pair, phase: Phase) -> list[Judged]:
    """All events of a phase in A's order."""
    events = pair.a.phase(phase), pair.b.phase(phase)
    homes = tuple({e.start: e.path for e in trace.events if e.kind == "module"} for trace in (pair.a, pair.b))
    keys = [[_key(event, home) for event in side] for side, home in zip(events, homes, strict=True)]
    judged = []
    for i, j in align(*keys):
        a = events[0][i] if i is not None else None
        b = events[1][j] if j is not None else None
        judged.append(_judge(pair, a, b) if a is not None and b is not None else _alone(a, b))
    return judged


def judge_parameters(pair: Pair) -> list[Judged]:
    """Versions of parameters by name and order. Where both runs had a parameter whole, its shards are left out: under FSDP the
    modules see the gathered one, and that is what the other run has too."""
    versions = [_versions(trace.parameters()) for trace in (pair.a, pair.b)]
    whole = {name for name, found in versions[0].items() if _has_whole(found) and _has_whole(versions[1].get(name, []))}
    sides: list[dict[tuple[str, int], Event]] = []
    for side in versions:
        kept = {n: [e for e in found if n not in whole or not e.outputs[0].is_shard] for n, found in side.items()}
        sides.append({(name, index): event for name, found in kept.items() for index, event in enumerate(found)})
    judged = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        a, b = sides[0].get(key), sides[1].get(key)
        judged.append(_judge(pair, a, b, by_row=False) if a is not None and b is not None else _alone(a, b))
    return judged


def _versions(events: list[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[event.path].append(event)
    return found


def _has_whole(events: list[Event]) -> bool:
    return any(not event.outputs[0].is_shard for event in events)


def judge_model_inputs(forward: list[Judged]) -> list[Judged]:
    """The outermost calls, of which only the inputs count here."""
    return [
        j for j in forward if j.a is not None and j.b is not None and j.event.depth == 0 and j.event.kind == "module"
    ]


def first(judged: list[Judged]) -> Judged | None:
    """The first event that made a difference, or may have; if all differences came from elsewhere, the first that has one."""
    made = (j for j in judged if j.judgement in ("origin", "unclear"))
    return next(made, None) or next((j for j in judged if j.judgement in DIFFERENT), None)


def between(origin: Judged, judged: list[Judged]) -> tuple[Judged | None, Judged | None]:
    """Inside a module that made a difference though none of its calls did: the last call that agrees in front of the first one
    whose inputs differ, and that one. The difference was made between them, in code that is no module."""
    if origin.a is None or origin.event.kind != "module" or origin.event.phase == "backward":
        return None, None
    last: Judged | None = None
    for child in judged:
        if child.a is None or child.a.parent != origin.a.start:
            continue
        if child.inputs_agree is False:
            return last, child
        last = child
    return last, None


# --- one event --------------------------------------------------------------------------------------------------------


def _key(event: Event, homes: dict[int, str]) -> tuple[str, ...]:
    """What makes two events the same one. An operator has no name of its own: it belongs to the module that called it."""
    if event.kind == "operator":
        return event.kind, event.path, homes.get(event.parent, "") if event.parent is not None else ""
    return event.kind, event.path


def _alone(a: Event | None, b: Event | None) -> Judged:
    return Judged(a, b, "only_a" if a is not None else "only_b")


def _judge(pair: Pair, a: Event, b: Event, by_row: bool = True) -> Judged:
    by_row = by_row and a.kind != "gradient"
    inputs = _compare_all(pair, a.path, "inputs", a.inputs, b.inputs, by_row)
    outputs = _compare_all(pair, a.path, "outputs", *_same_contributions(a.outputs, b.outputs), by_row)
    outputs += _other_contributions(a.outputs, b.outputs)
    for where in a.values.keys() & b.values.keys():
        place = outputs if where.startswith("output") else inputs
        if a.values[where] != b.values[where]:
            place.append(Compared(where, "value", f"{a.values[where]} against {b.values[where]}"))
    notes = [note for note in dict.fromkeys((a.note, b.note)) if note]
    if by_row or pair.rows is None or not pair.rows.a or a.kind != "gradient":
        judgement = judge(_all_agree(inputs), _all_agree(outputs))
    else:  # a sum over other rows is another sum
        judgement = "same" if _all_agree(outputs) else "incomparable"
        notes.append("a parameter's gradient sums over all rows of its run")
    return Judged(a, b, judgement, inputs, outputs, notes)


def judge(inputs: bool | None, outputs: bool | None) -> Judgement:
    """From whether inputs and outputs agree; None is: cannot be said."""
    if outputs is False:
        return "origin" if inputs else "unclear" if inputs is None else "carried"
    if outputs is None:
        return "incomparable" if inputs is not False else "carried"
    return "recovered" if inputs is False else "same"


def _all_agree(places: list[Compared]) -> bool | None:
    found = [place.agrees for place in places]
    return False if False in found else None if None in found else True


def _compare_all(
    pair: Pair, path: str, place: str, a: list[TensorRecord], b: list[TensorRecord], by_row: bool
) -> list[Compared]:
    """By place; what has no partner there (given by position in one run, by keyword in the other) in order."""
    by_where = {record.where: record for record in b}
    matched = [(record, by_where.pop(record.where, None)) for record in a]
    left = [record for record in b if record.where in by_where]
    found = []
    for one, other in matched:
        partner = other or (left.pop(0) if left else None)
        if partner is None:
            found.append(Compared(one.where, "incomparable", "only in A"))
        else:
            found.append(compare(pair, path, place, one, partner, by_row))
    return found + [Compared(record.where, "incomparable", "only in B") for record in left]


def _contributions(records: list[TensorRecord]) -> Counter[str]:
    """How many parts of the gradient of each input a call made: ``grad.args.0``, ``grad.args.0#1``, ..."""
    return Counter(record.where.partition("#")[0] for record in records)


def _same_contributions(a: list[TensorRecord], b: list[TensorRecord]) -> tuple[list[TensorRecord], list[TensorRecord]]:
    """Without the gradients that one run made of more parts than the other: the parts are no counterparts then."""
    ours, theirs = _contributions(a), _contributions(b)
    other = {place for place in ours.keys() & theirs.keys() if ours[place] != theirs[place]}
    kept = [[r for r in records if r.where.partition("#")[0] not in other] for records in (a, b)]
    return kept[0], kept[1]


def _other_contributions(a: list[TensorRecord], b: list[TensorRecord]) -> list[Compared]:
    ours, theirs = _contributions(a), _contributions(b)
    return [
        Compared(
            place, "incomparable", f"made of {ours[place]} parts against {theirs[place]}; their sums meet elsewhere"
        )
        for place in ours
        if place in theirs and ours[place] != theirs[place]
    ]


def _judge_parameter_gradients(judged: list[Judged]) -> None:
    """A parameter's gradient is made by the backward of its module: the gradients that arrived there are its inputs."""
    arrived: dict[str, list[bool | None]] = defaultdict(list)
    for j in judged:
        if j.event.kind == "module" and j.a is not None and j.b is not None:
            arrived[j.event.path].append(j.inputs_agree)
    for j in judged:
        if j.event.kind != "gradient" or j.judgement != "origin":
            continue
        owner, _, _ = j.event.path.rpartition(".")
        seen = arrived.get(owner or "(model)", [])
        inputs = False if False in seen else None if None in seen or not seen else True
        j.judgement = judge(inputs, False)
