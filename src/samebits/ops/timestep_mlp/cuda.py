"""CUDA backend of ``timestep_mlp``: which kernels run a call, and their launches. Every plan of a call has the same bits.

Floors at 256 -> 5376 -> 2688: the weights are 63.3 MB, so forward and the two products with their transposes take 15 us each at
4.2 TB/s as long as rows are few; writing their gradients takes as long again. Many rows are bound by arithmetic: 31 MFLOP per
row forward, twice that backward, at 67 TFLOP/s of FP32.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.timestep_mlp import products
from samebits.ops.timestep_mlp.products import Plan
from samebits.ops.timestep_mlp.spec import SPEC
from samebits.ops.timestep_mlp.tiles import Steps


def plans(call: Call) -> tuple[Plan, ...]:
    if not call.backward:
        return products.together(
            products.linear(call, "first", "K", "F", ("x", "w1"), silu=1),
            products.linear(call, "second", "F", "D", ("w2",), silu=0),
        )
    wanted = set(call.wanted)
    parts: list[list[Steps]] = []
    if wanted & {"grad_w2", "grad_b2"}:
        parts.append(products.weight_gradient(call, "second", "w2", "b2", "D", "F", ("grad_y", "act")))
    if wanted & {"grad_x", "grad_w1", "grad_b1"}:
        parts.append(products.across(call, "pre", "D", "F", ("grad_y", "w2", "pre"), slope=1))
    if wanted & {"grad_w1", "grad_b1"}:
        parts.append(products.weight_gradient(call, "first", "w1", "b1", "F", "K", ("x",)))
    if "grad_x" in wanted:
        parts.append(products.across(call, "x", "F", "K", ("w1",), slope=0))
    return products.together(*parts)


def run(
    call: Call,
    plan: Plan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    if not call.backward:
        pre, act = results["pre"], results["act"]
        products.run_linear(plan, "first", x, w1, inputs["b1"], pre, act)
        products.run_linear(plan, "second", act, w2, inputs["b2"], results["y"], None)
        return
    grad_y = inputs["grad_y"]
    if "second" in plan:
        products.run_weight_gradient(
            plan["second"], grad_y, inputs["act"], results.get("grad_w2"), results.get("grad_b2")
        )
    if "pre" not in plan:
        return
    grad_pre = grad_y.new_empty(call.rows, call.size("F"))
    products.run_across(plan, "pre", grad_y, w2, inputs["pre"], grad_pre)
    if "first" in plan:
        products.run_weight_gradient(plan["first"], grad_pre, x, results.get("grad_w1"), results.get("grad_b1"))
    if "x" in plan:
        products.run_across(plan, "x", grad_pre, w1, None, results["grad_x"])


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return products.builds(SPEC, plans, activated=True)
