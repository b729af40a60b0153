"""What must hold of a generation with our operators; everything else in it is a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samebits.models.minimax_h3.block import ERROR_FACTOR, ERROR_SLACK
from samebits.models.minimax_h3.check import Check, judged
from samebits.models.minimax_h3.model_rules import near

if TYPE_CHECKING:
    from samebits.models.minimax_h3.generation_replay import GenerationCase


def check_generation(cases: Sequence[GenerationCase]) -> tuple[Check, ...]:
    return (
        judged(
            "every call site runs our operator",
            [(f"{case.title}: {name}", name not in case.unused) for case in cases for name in case.sites],
        ),
        judged(
            "the pipeline's layout and timesteps are those of our own packing",
            [(f"{case.title}: {name}", held) for case in cases for name, held in case.layout.items()],
        ),
        judged(
            "every step has the same bits again, beside other sequences in the batch, and in another process",
            [
                (f"{case.title}: {name}, at {where}", where is None)
                for case in cases
                for name, where in case.runs.items()
            ],
        ),
        judged(
            "given the class's latents, no velocity is further from FP64, in the mean, than "
            f"{ERROR_FACTOR:g} times the class's, plus {ERROR_SLACK:g}",
            [
                (f"{case.title}: step {step.step}", near(step.rms, step.peer_rms))
                for case in cases
                for step in case.steps
            ],
        ),
        judged(
            "unpatched again, the model generates its own bits",
            [(f"{case.title}: at {case.restored}", case.restored is None) for case in cases],
        ),
        judged(
            "the earlier sealed record has come out again",
            [(f"{case.title}: at {where}", where is None) for case in cases for where in case.earlier],
        ),
    )
