"""Defines the bits of ``qk_norm_rope``: those of ``qk_rmsnorm`` and then ``rope_3axis``."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.ops.qk_rmsnorm.reference import backward, forward
from samebits.ops.rope_3axis.reference import gradient, rotated


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight, angles = inputs["x"], inputs["weight"], (inputs["cos"], inputs["sin"])
    if call.backward:
        backward(gradient(inputs["grad_y"], *angles), x, weight, inputs["rstd"], results)
        return
    n, rstd = forward(x, weight, scalars["eps"])
    results["y"].copy_(rotated(n, *angles))
    results["rstd"].copy_(rstd)
