"""Defines the bits of ``fp32_linear``: the products of ``timestep_mlp`` (ops/timestep_mlp/reference.py), one at a time."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import fold
from samebits.ops.timestep_mlp.reference import across, linear, weight_gradient


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    if not call.backward:
        results["y"].copy_(linear(inputs["x"], inputs["weight"], inputs["bias"]))
        return
    grad = inputs["grad_y"]
    if "grad_x" in results:
        results["grad_x"].copy_(across(grad, inputs["weight"]))
    if "grad_weight" in results:
        results["grad_weight"].copy_(weight_gradient(grad, inputs["x"]))
    if "grad_bias" in results:
        results["grad_bias"].copy_(fold.left_fold(grad, 0))
