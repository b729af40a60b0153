"""Defines the bits of ``rmsnorm_modulated``. One FP32 rounding per written operation; the norm is that of ops/rmsnorm."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import segment_sums
from samebits.ops.rmsnorm.reference import gradient_of_x, normed, rstd_of, terms_of_weight
from samebits.segmentation import sorted_positions


def factor(scale: Tensor) -> Tensor:
    """rd(1 + scale), as FP32."""
    return (torch.ones_like(scale, dtype=torch.float32) + scale.float()).to(scale.dtype).float()


def modulated(n: Tensor, by: Tensor, shift: Tensor) -> Tensor:
    """rd(rd(n * by) + shift)."""
    return ((n * by).to(shift.dtype).float() + shift.float()).to(shift.dtype)


def segments_of(inputs: dict[str, Tensor], rows: int, what: str) -> tuple[Tensor, Tensor]:
    """(order, bounds), checked; made from the index where the caller gave none."""
    order, bounds = inputs.get("order"), inputs.get("bounds")
    if order is None or bounds is None:
        made = sorted_positions(inputs["index"], rows)
        order, bounds = made[0] if order is None else order, made[1] if bounds is None else bounds
    segment_sums.check_segments(inputs["index"], order, bounds, what)
    return order, bounds


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight, scale, index = inputs["x"], inputs["weight"], inputs["scale"], inputs["index"]
    segment_sums.check_index(index, call.size("R"), f"{call.op}: index")
    here = index.clamp(0, call.size("R") - 1)  # on a GPU nothing above has waited for the check
    by = factor(scale)[here]
    if not call.backward:
        rstd = rstd_of(x, scalars["eps"])
        results["y"].copy_(modulated(normed(x, rstd, weight), by, inputs["shift"][here]))
        results["rstd"].copy_(rstd)
        return
    upstream, rstd = inputs["grad_y"].float(), inputs["rstd"]
    if "grad_x" in results:
        results["grad_x"].copy_(gradient_of_x(upstream * by, x, weight, rstd))
    if results.keys() <= {"grad_x"}:
        return
    order, bounds = segments_of(inputs, call.size("R"), call.op)
    if "grad_shift" in results:
        results["grad_shift"].copy_(segment_sums.segment_sums(upstream, order, bounds))
    if "grad_scale" in results:
        results["grad_scale"].copy_(segment_sums.segment_sums(upstream * normed(x, rstd, weight), order, bounds))
    if "grad_weight" in results:
        partials = segment_sums.tile_sums(terms_of_weight(upstream * by, x, rstd), order, bounds)
        results["grad_weight"].copy_(segment_sums.sum_of_all(partials))
