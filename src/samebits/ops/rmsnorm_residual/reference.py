"""Defines the bits of ``rmsnorm_residual``. One FP32 rounding per written operation; runs on any device.

``rsqrt`` is the device's own; ``samebits.bits_of`` gives a CPU that of a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold

_FOLD_OVER_D = {"ascending": lambda terms: fold.left_fold(terms, -1), "tree512": fold.tree512}


def _over(value: Tensor, count: int) -> Tensor:
    """A true division by the integer ``count``. tensor / python-number would be a product with 1/count on CUDA."""
    return value / torch.full_like(value, count)


def forward(x: Tensor, gamma: Tensor, eps: float, contract: str) -> tuple[Tensor, Tensor]:
    """(y, rstd): rstd = rsqrt(sum(x*x) / D + eps), y = bf16((x * rstd) * gamma)."""
    wide = x.float()
    total = _FOLD_OVER_D[contract](wide * wide)
    rstd = elementary.rsqrt(_over(total, x.shape[-1]) + torch.full_like(total, eps))
    return ((wide * rstd[..., None]) * gamma).bfloat16(), rstd


def backward_x(
    grad_y: Tensor, grad_residual: Tensor | None, x: Tensor, gamma: Tensor, rstd: Tensor, contract: str
) -> Tensor:
    """grad_x = (rstd*u - ((x*rstd^3) * sum(u*x)) / D) + grad_residual with u = grad_y * gamma, FP32."""
    wide = x.float()
    upstream = grad_y.float() * gamma
    total = _FOLD_OVER_D[contract](upstream * wide)
    cube = (rstd * rstd) * rstd
    r, r3, total = rstd[..., None], cube[..., None], total[..., None]
    norm_leg = r * upstream - _over((wide * r3) * total, x.shape[-1])
    residual_leg = torch.zeros_like(norm_leg) if grad_residual is None else grad_residual.float()
    return norm_leg + residual_leg


def backward_gamma(grad_y: Tensor, x: Tensor, rstd: Tensor, start: Tensor | None = None) -> Tensor:
    """grad_gamma[d] = sum over ascending rows of (grad_y * x) * rstd, FP32, continued from ``start``."""
    return fold.left_fold((grad_y.float() * x.float()) * rstd[:, None], 0, start)


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, gamma = inputs["x"], inputs["gamma"]
    if not call.backward:
        y, rstd = forward(x, gamma, scalars["eps"], call.contract)
        results["y"].copy_(y)
        results["residual"].copy_(x)
        results["rstd"].copy_(rstd)
        return
    if "grad_x" in results:
        grad_x = backward_x(inputs["grad_y"], inputs.get("grad_residual"), x, gamma, inputs["rstd"], call.contract)
        results["grad_x"].copy_(grad_x)
    if "grad_gamma" in results:
        grad_gamma = backward_gamma(inputs["grad_y"], x, inputs["rstd"], inputs.get("start_gamma"))
        results["grad_gamma"].copy_(grad_gamma)
