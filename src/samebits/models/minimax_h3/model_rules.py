"""What must hold of a whole model with our operators in it; everything else in its qualification is a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samebits.models.minimax_h3.block import ERROR_FACTOR, ERROR_SLACK
from samebits.models.minimax_h3.block_rules import LEAF_FACTOR, LEAF_SLACK, LEAF_ULPS, leaf_close
from samebits.models.minimax_h3.check import Check, judged

if TYPE_CHECKING:
    from samebits.models.minimax_h3.model_replay import ModelCase


def check_model(cases: Sequence[ModelCase]) -> tuple[Check, ...]:
    """All checks; those of gradients only where gradients were run."""
    found = [(f"{case.title}: {at.name}", at) for case in cases for at in case.boundaries]
    made = [
        judged(
            "every call site runs our operator",
            [(f"{case.title}: {name}", name not in case.unused) for case in cases for name in case.sites],
        ),
        judged("every boundary repeats bit for bit", [(place, at.repeat) for place, at in found]),
        judged(
            "a sequence has the same bits alone and at another place in the batch, at every boundary",
            [(place, not at.rows.varying) for place, at in found],
        ),
        judged(
            f"no boundary is further from FP64, in the mean, than {ERROR_FACTOR:g} times the class, plus {ERROR_SLACK:g}",
            [(place, near(at.rms, at.peer_rms)) for place, at in found],
        ),
        judged("unpatched again, the model has its own bits", [(case.title, case.restored) for case in cases]),
    ]
    reached = [(f"{c.title}: {at.name}", at) for c in cases if c.gradients for at in c.gradients.reached]
    leaves = [(f"{c.title}: {leaf.name}", leaf) for c in cases if c.gradients for leaf in c.gradients.leaves]
    if leaves:
        repeated = [(place, at.repeat) for place, at in leaves]
        made += [
            judged("every gradient repeats bit for bit", repeated + [(place, at.repeat) for place, at in reached]),
            judged(
                "the gradient of a row has the same bits with its sequence alone and at another place in the batch",
                [(place, not at.rows.varying) for place, at in reached],
            ),
            judged(
                f"no gradient is further from FP64 than {LEAF_FACTOR:g} times the class's, plus {LEAF_SLACK:g}, or than the "
                f"class's and {LEAF_ULPS} ulps",
                [(place, leaf_close(leaf)) for place, leaf in leaves],
            ),
        ]
    return tuple(made)


def near(ours: float | None, theirs: float | None) -> bool:
    """Whether a distance from FP64 is about the class's, or less; a distance that is not finite has no number."""
    return ours is not None and (theirs is None or ours <= ERROR_FACTOR * theirs + ERROR_SLACK)
