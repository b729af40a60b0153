"""What must hold of a replay; everything else in it is a measurement. The one place for pass and fail.

A stage that the eager provider stands in for is not judged: it promises nothing. The peer is never judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from samebits.models.minimax_h3.backward import Gradients
from samebits.models.minimax_h3.check import Check, judged, of_stages
from samebits.models.minimax_h3.stages import TIME_EMBEDDER

if TYPE_CHECKING:
    from samebits.models.minimax_h3.backward import Leaf, LeafResult
    from samebits.models.minimax_h3.record import CaseResult

FUSED_EMBEDDER_ERROR = 1e-5
"""Largest relative error of the fused mode's gradients of the timestep embedder."""
FUSED_ROUNDED = 0.99
"""Least share of correctly rounded elements in the fused mode's gradients of the projection."""
GRADIENT_FACTOR, GRADIENT_SLACK = 1.5, 5e-3
"""A gradient's relative error may be this many times the peer's, plus this."""


def check(cases: Sequence[CaseResult]) -> tuple[Check, ...]:
    """All checks; those of gradients only where gradients were run."""
    made = [
        of_stages(cases, "every stage repeats bit for bit", lambda stage: stage.repeat),
        of_stages(cases, "a row has the same bits alone as in the batch", lambda stage: not stage.rows.varying),
        of_stages(
            cases,
            "fed by the peer, every stage that promises it has the peer's bits",
            lambda stage: stage.isolated.same,
            lambda stage: stage.promised,
        ),
        of_stages(cases, "every stage is within its tolerance of the golden", lambda stage: stage.within_tolerance),
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


def _leaves(
    cases: Sequence[CaseResult],
    name: str,
    holds: Callable[[Leaf, str, LeafResult], bool],
    modes: Sequence[str] = ("separate", "fused"),
) -> Check:
    asked = [entry for entry in _judged(cases) if entry[2] in modes]
    return judged(
        name, [(f"{title}, {mode}: {leaf.name}", holds(leaf, mode, ours)) for title, leaf, mode, ours in asked]
    )


def _fused_forward(cases: Sequence[CaseResult], name: str) -> Check:
    asked = [(c.title, c.gradients) for c in cases if isinstance(c.gradients, Gradients) and not c.gradients.stand_ins]
    return judged(name, [(title, gradients.fused_forward.same) for title, gradients in asked])


def _judged(cases: Sequence[CaseResult]) -> Iterator[tuple[str, Leaf, str, LeafResult]]:
    for case in cases:
        if not isinstance(case.gradients, Gradients):
            continue
        for leaf in case.gradients.leaves:
            for mode, ours in leaf.modes.items():
                if mode != "peer" and mode not in case.gradients.stand_ins:
                    yield case.title, leaf, mode, ours
