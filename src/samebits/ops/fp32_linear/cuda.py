"""CUDA backend of ``fp32_linear``: the products of ``timestep_mlp`` (ops/timestep_mlp/products.py), one at a time.

Every plan of a call has the same bits.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.fp32_linear.spec import SPEC
from samebits.ops.timestep_mlp import products
from samebits.ops.timestep_mlp.products import Plan
from samebits.ops.timestep_mlp.tiles import Steps


def plans(call: Call) -> tuple[Plan, ...]:
    if not call.backward:
        return products.together(products.linear(call, "y", "K", "N", ("x", "weight"), silu=0))
    parts: list[list[Steps]] = []
    if {"grad_weight", "grad_bias"} & set(call.wanted):
        parts.append(products.weight_gradient(call, "sums", "weight", "bias", "N", "K", ("grad_y", "x")))
    if "grad_x" in call.wanted:
        parts.append(products.across(call, "x", "N", "K", ("grad_y", "weight"), slope=0))
    return products.together(*parts)


def run(
    call: Call,
    plan: Plan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    if not call.backward:
        products.run_linear(plan, "y", x, weight, inputs["bias"], results["y"], None)
        return
    grad = inputs["grad_y"]
    if "sums" in plan:
        products.run_weight_gradient(plan["sums"], grad, x, results.get("grad_weight"), results.get("grad_bias"))
    if "x" in plan:
        products.run_across(plan, "x", grad, weight, None, results["grad_x"])


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return products.builds(SPEC, plans, activated=False)
