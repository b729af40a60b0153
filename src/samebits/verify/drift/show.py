"""The findings as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from samebits.verify.drift.compare import JUDGEMENTS, Judged
from samebits.verify.drift.result import Drift
from samebits.verify.trace.file import Trace

MOST = 12
"""Names per list; what is left out is counted."""


def lines(drift: Drift) -> Iterator[str]:
    """What decides first: other weights or other inputs make everything behind them another computation."""
    for name, trace in (("A", drift.a), ("B", drift.b)):
        yield f"{name}: {_named(trace)}"
    yield from (f"setting differs: {text}" for text in _some(drift.settings))
    yield from _parameters(drift)
    for judged in drift.differing_inputs:
        yield f"MODEL INPUTS DIFFER: {judged.name}: {places(judged, inputs=True)}"
    for phase, judged_events in drift.phases.items():
        origin = drift.first(phase)
        if origin is None:
            verdict = "no difference" if any(j.judgement == "same" for j in judged_events) else "nothing comparable"
            yield f"{phase}: {verdict}"
        else:
            what = (
                "FIRST DRIFT" if origin.judgement in ("origin", "unclear") else "no drift of its own; first difference"
            )
            yield f"{phase}: {what} {origin.name}: {JUDGEMENTS[origin.judgement]}"
            yield f"    {places(origin)}"
            before, after = drift.between(phase)
            if after is not None:
                behind = f"behind {before.name}, which agrees, and " if before is not None else ""
                yield f"    made {behind}in front of {after.name}, whose inputs differ: no module of its own"
            yield from (f"    {note}" for note in origin.notes)
        counts = "; ".join(f"{count}: {JUDGEMENTS[name]}" for name, count in drift.counts(phase).items())  # type: ignore[index]
        yield f"    {counts}"
    yield {0: "same bits", 1: "drift", 2: "nothing could be compared"}[drift.exit_code]


def _parameters(drift: Drift) -> Iterator[str]:
    same = sum(j.judgement == "same" for j in drift.parameters)
    alone = [j for j in drift.parameters if j.judgement in ("only_a", "only_b")]
    yield f"parameters and buffers: {same} of {len(drift.parameters)} agree" + (
        f", {len(alone)} in one run only" if alone else ""
    )
    if drift.differing_parameters:
        yield "PARAMETERS DIFFER:"
        yield from (f"    {text}" for text in _some([f"{j.name}: {places(j)}" for j in drift.differing_parameters]))


def places(judged: Judged, inputs: bool = False) -> str:
    """Every place of a call that differs, with how."""
    every = judged.inputs if inputs else judged.outputs
    found = [p for p in every if p.agrees is False] or [p for p in judged.inputs if p.agrees is False]
    return "; ".join(f"{p.where}: {p.verdict}" + (f", {p.detail}" if p.detail else "") for p in found)


def _named(trace: Trace) -> str:
    rank = f", rank {trace.header.get('rank')} of {trace.header.get('world_size')}"
    stopped = f", stopped in {trace.stopped.get('path')} by {trace.stopped.get('error')}" if trace.stopped else ""
    return f"{trace.path or 'in memory'}, {len(trace.events)} events{rank}{stopped}"


def _some(texts: list[str]) -> list[str]:
    return texts if len(texts) <= MOST else [*texts[:MOST], f"... and {len(texts) - MOST} more"]
