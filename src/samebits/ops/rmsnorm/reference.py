"""Defines the bits of ``rmsnorm`` and of what other operators take from it. One FP32 rounding per written operation.

``rsqrt`` is the device's own; ``samebits.bits_of`` gives a CPU that of a GPU.
A function named after a stored value returns it as FP32 that the element type can hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, norm_sums, segment_sums


def over_count(value: Tensor, count: int) -> Tensor:
    """A true division by the integer ``count``. tensor / python-number would be a product with 1/count on CUDA."""
    return value / torch.full_like(value, count)


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """rsqrt(sum(x*x) / H + eps), the sum in torch's order."""
    total = norm_sums.squares_of_torch_norm(x.float())
    return elementary.rsqrt(over_count(total, x.shape[-1]) + torch.full_like(total, eps))


def normed(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """rd(weight * (rstd * x)), rd: rounded to the dtype of x."""
    return (weight.float() * (rstd[:, None] * x.float())).to(x.dtype).float()


def gradient_of_x(upstream: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """rstd*u - x*coef with u = weight * upstream and coef = (((rstd*rstd)*rstd) * sum(u*x)) / H; ``upstream`` is FP32."""
    wide, u = x.float(), weight.float() * upstream
    dot = norm_sums.vector_tree(u * wide)
    coef = over_count(((rstd * rstd) * rstd) * dot, x.shape[-1])
    return rstd[:, None] * u - wide * coef[:, None]


def terms_of_weight(upstream: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """What each row adds to the gradient of weight: upstream * (x * rstd)."""
    return upstream * (x.float() * rstd[:, None])


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    if not call.backward:
        rstd = rstd_of(x, scalars["eps"])
        results["y"].copy_(normed(x, rstd, weight))
        results["rstd"].copy_(rstd)
        return
    upstream, rstd = inputs["grad_y"].float(), inputs["rstd"]
    if "grad_x" in results:
        results["grad_x"].copy_(gradient_of_x(upstream, x, weight, rstd))
    if "grad_weight" in results:
        partials = segment_sums.tile_sums_in_order(terms_of_weight(upstream, x, rstd))
        results["grad_weight"].copy_(segment_sums.sum_of_all(partials))
