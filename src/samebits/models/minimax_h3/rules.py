"""What must hold of a replay; everything else in it is a measurement. The one place for pass and fail.

A stage that the eager provider stands in for is not judged: it promises nothing. The peer is never judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.models.minimax_h3.stages import TIME_EMBEDDER

if TYPE_CHECKING:
    from samebits.models.minimax_h3.backward import Leaf, LeafResult
    from samebits.models.minimax_h3.replay import CaseResult, StageResult

FUSED_EMBEDDER_ERROR = 1e-5
"""Largest relative error of the fused mode's gradients of the timestep embedder."""
FUSED_ROUNDED = 0.99
"""Least share of correctly rounded elements in the fused mode's gradients of the projection."""
GRADIENT_FACTOR, GRADIENT_SLACK = 1.5, 5e-3
"""A gradient's relative error may be this many times the peer's, plus this."""


@dataclass(frozen=True)
class Check:
    """Something that must hold, whether it did, and where it did not."""

    name: str
    judged: int
    """How many stages or gradients it was asked of. Of none, it says nothing, and passes."""
    passed: bool
    detail: str = ""


def check(cases: Sequence[CaseResult]) -> tuple[Check, ...]:
    """All checks; those of gradients only where gradients were run."""
    made = [
        _stages(cases, "every stage repeats bit for bit", lambda stage: stage.repeat),
        _stages(cases, "a row has the same bits alone as in the batch", lambda stage: not stage.rows.varying),
        _stages(
            cases,
            "fed by the peer, every stage that promises it has the peer's bits",
            lambda stage: stage.isolated.same,
            lambda stage: stage.promised,
        ),
        _stages(cases, "every stage is within its tolerance of the golden", lambda stage: stage.within_tolerance),
    ]
    if any(case.gradients for case in cases):
        made += [
            _fused_forward(cases, "fused, the forward has the bits of projection and gather"),
            _leaves(cases, "every gradient repeats bit for bit", lambda leaf, mode, ours: ours.repeat),
            _leaves(
                cases,
                f"no gradient is further from the golden than {GRADIENT_FACTOR:g} times the peer's, plus {GRADIENT_SLACK:g}",
                _close,
            ),
            _leaves(
                cases,
                f"fused, gradients of the time embedder are within {FUSED_EMBEDDER_ERROR:g} of the golden, and of those of "
                f"the projection {FUSED_ROUNDED:.0%} are correctly rounded",
                _fused,
                ("fused",),
            ),
        ]
    return tuple(made)


def _close(leaf: Leaf, mode: str, ours: LeafResult) -> bool:
    theirs = leaf.modes["peer"].relative
    if ours.relative is None:
        return False
    return theirs is None or ours.relative <= GRADIENT_FACTOR * theirs + GRADIENT_SLACK


def _fused(leaf: Leaf, mode: str, ours: LeafResult) -> bool:
    if leaf.name in TIME_EMBEDDER:
        return ours.relative is not None and ours.relative < FUSED_EMBEDDER_ERROR
    return ours.correctly_rounded > FUSED_ROUNDED


def _stages(
    cases: Sequence[CaseResult],
    name: str,
    holds: Callable[[StageResult], bool],
    asked: Callable[[StageResult], bool] = lambda stage: True,
) -> Check:
    judged = [(c.title, stage) for c in cases for stage in c.stages if not stage.stand_in and asked(stage)]
    return _check(name, [(f"{title}: {stage.name}", holds(stage)) for title, stage in judged])


def _leaves(
    cases: Sequence[CaseResult],
    name: str,
    holds: Callable[[Leaf, str, LeafResult], bool],
    modes: Sequence[str] = ("separate", "fused"),
) -> Check:
    judged = [entry for entry in _judged(cases) if entry[2] in modes]
    return _check(
        name, [(f"{title}, {mode}: {leaf.name}", holds(leaf, mode, ours)) for title, leaf, mode, ours in judged]
    )


def _fused_forward(cases: Sequence[CaseResult], name: str) -> Check:
    judged = [(c.title, c.gradients) for c in cases if c.gradients and not c.gradients.stand_ins]
    return _check(name, [(title, gradients.fused_forward.same) for title, gradients in judged])


def _check(name: str, found: Sequence[tuple[str, bool]]) -> Check:
    broken = [place for place, held in found if not held]
    return Check(name, len(found), not broken, "; ".join(broken))


def _judged(cases: Sequence[CaseResult]) -> Iterator[tuple[str, Leaf, str, LeafResult]]:
    for case in cases:
        if case.gradients is None:
            continue
        for leaf in case.gradients.leaves:
            for mode, ours in leaf.modes.items():
                if mode != "peer" and mode not in case.gradients.stand_ins:
                    yield case.title, leaf, mode, ours
