"""What a comparison of two traces found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.verify.drift import compare
from samebits.verify.drift.compare import DIFFERENT, JUDGEMENTS, Judged
from samebits.verify.drift.rows import RowMap
from samebits.verify.drift.tensors import Pair
from samebits.verify.trace.events import Phase
from samebits.verify.trace.file import Trace, read

FORMAT = "samebits-drift"
VERSION = 1


class DriftError(ValueError):
    """The two traces cannot be compared at all. The message says why."""


@dataclass
class Drift:
    """Every event of two runs, judged."""

    a: Trace
    b: Trace
    phases: dict[Phase, list[Judged]]
    """In A's order of execution."""
    parameters: list[Judged]
    settings: list[str] = field(default_factory=list)
    """How environment, switches and module settings differ; none of it is a difference of bits."""

    @property
    def differing_parameters(self) -> list[Judged]:
        return [j for j in self.parameters if j.judgement in DIFFERENT]

    @property
    def differing_inputs(self) -> list[Judged]:
        """Outermost calls that were given something else."""
        outermost = compare.judge_model_inputs(self.phases.get("forward", []))
        return [j for j in outermost if j.inputs_agree is False]

    def first(self, phase: Phase = "forward") -> Judged | None:
        """The first operation of a phase whose inputs agree and whose outputs do not."""
        return compare.first(self.phases.get(phase, []))

    def between(self, phase: Phase = "forward") -> tuple[Judged | None, Judged | None]:
        """Where inside the first operation, see :func:`samebits.verify.drift.compare.between`."""
        origin = self.first(phase)
        return (None, None) if origin is None else compare.between(origin, self.phases[phase])

    def counts(self, phase: Phase) -> dict[str, int]:
        found = Counter(j.judgement for j in self.phases[phase])
        return {name: found[name] for name in JUDGEMENTS if found[name]}

    @property
    def drifted(self) -> bool:
        every = [self.parameters, *self.phases.values()]
        return any(j.judgement in DIFFERENT for judged in every for j in judged)

    @property
    def comparable(self) -> bool:
        """Whether at least one call of both runs could be judged."""
        return any(j.judgement in ("same", *DIFFERENT) for judged in self.phases.values() for j in judged)

    @property
    def exit_code(self) -> int:
        """0: the same, 1: drift, 2: nothing could be compared."""
        return 1 if self.drifted else 0 if self.comparable else 2

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": FORMAT,
            "version": VERSION,
            "exit_code": self.exit_code,
            "a": side(self.a),
            "b": side(self.b),
            "settings": self.settings,
            "parameters": [j.to_json() for j in self.differing_parameters],
            "model_inputs": [j.to_json() for j in self.differing_inputs],
            "first": {phase: _json(self.first(phase)) for phase in self.phases},
            "between": {phase: [_json(j) for j in self.between(phase)] for phase in self.phases},
            "summary": {phase: self.counts(phase) for phase in self.phases},
            "events": [j.to_json() for judged in self.phases.values() for j in judged if j.judgement != "same"],
        }


def drift(a: Trace | str | Path, b: Trace | str | Path, rows: RowMap | None = None) -> Drift:
    """Compare two traces, or trace files, and find the first operation that differs, in each phase.

    ``rows`` says which row of A is which of B, for runs of different batch composition; both must have been recorded with
    ``rows=``. Raises DriftError where the traces cannot be compared, TraceError or OSError for a file that cannot be read.
    """
    left, right = (trace if isinstance(trace, Trace) else read(trace) for trace in (a, b))
    if left.digest_name != right.digest_name:
        raise DriftError(
            f"A has digests {left.digest_name!r}, B {right.digest_name!r}: they say nothing about each other"
        )
    for name, trace in (("A", left), ("B", right)):
        if not trace.events:
            raise DriftError(f"{name} recorded nothing")
    if rows is not None and rows.a:
        for name, trace in (("A", left), ("B", right)):
            if not trace.header.get("options", {}).get("rows"):
                raise DriftError(f"a row map needs row digests: record {name} with rows")
    pair = Pair(left, right, rows)
    return Drift(left, right, compare.judge_phases(pair), compare.judge_parameters(pair), _settings(left, right))


def side(trace: Trace) -> dict[str, Any]:
    """What names one run: file, rank, where it stopped."""
    header = trace.header
    return {
        "path": None if trace.path is None else str(trace.path),
        "rank": header.get("rank"),
        "world_size": header.get("world_size"),
        "events": len(trace.events),
        "stopped": trace.stopped,
        "environment": header.get("environment", {}),
    }


def _settings(a: Trace, b: Trace) -> list[str]:
    found = []
    for part in ("environment", "settings", "options", "modules"):
        one, other = a.header.get(part) or {}, b.header.get(part) or {}
        for key in dict.fromkeys((*one, *other)):
            left, right = one.get(key), other.get(key)
            if left != right and (part != "modules" or (key in one and key in other)):
                found.append(f"{key}: {left} against {right}")
    return found


def _json(judged: Judged | None) -> dict[str, Any] | None:
    return None if judged is None else judged.to_json()
