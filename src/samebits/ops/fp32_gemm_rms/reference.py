"""Defines the bits of ``fp32_gemm_rms``. One FP32 rounding per written operation; runs on any device.

``rsqrt`` (RMS form dsv4) is the device's own; ``samebits.bits_of`` gives a CPU that of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold
from samebits.ops.fp32_gemm_rms import fast

_PRODUCTS = 2**22
"""Held at once."""


def is_fast(contract: str) -> bool:
    return contract.startswith("fast")


def is_dsv4(contract: str) -> bool:
    return contract.endswith("-dsv4")


def _like(value: Tensor, number: float) -> Tensor:
    """A number as a tensor: tensor / python-number would be a product with its reciprocal on CUDA."""
    return torch.full_like(value, number)


def _sqrt(values: Tensor) -> Tensor:
    """Correctly rounded, which torch's FP32 square root on a CPU is not: no FP32 root lies so close to a tie that the
    rounding of the FP64 one could matter."""
    return torch.sqrt(values.double()).float()


def project(x: Tensor, weight: Tensor) -> Tensor:
    """proj[t, n] = left fold over k of x[t, k] * weight[n, k]; x is (T, K), weight (N, K), both FP32."""
    acc = x.new_zeros(x.shape[0], weight.shape[0])
    for part in _parts(x.shape[1], acc.numel()):
        acc = fold.left_fold(x[:, None, part] * weight[None, :, part], -1, acc)
    return acc


def _parts(terms: int, chains: int) -> Iterator[slice]:
    """Consecutive parts of the terms of so many chains, each with few enough products to hold. A fold continues over them."""
    step = max(1, _PRODUCTS // max(1, chains))
    for first in range(0, terms, step):
        yield slice(first, first + step)


def rms(squares: Tensor, size: int, eps: float, contract: str) -> tuple[Tensor, Tensor]:
    """(r, q) of a sum of squares over ``size`` elements."""
    if is_dsv4(contract):
        q = squares / _like(squares, size)
        return elementary.rsqrt(q + _like(q, eps)), q
    q = _sqrt(squares) / _like(squares, math.sqrt(size))
    return _like(q, 1.0) / (q + _like(q, eps)), q


def forward(x: Tensor, weight: Tensor, eps: float, contract: str) -> tuple[Tensor, Tensor, Tensor]:
    """(proj, r, q) of x (T, K) and weight (N, K)."""
    if is_fast(contract):
        proj, squares = fast.project(x, weight), fast.sum_of_squares(x)
    else:
        wide = x.float()
        proj, squares = project(wide, weight), fold.left_fold(wide * wide, -1)
    return proj, *rms(squares, x.shape[-1], eps, contract)


def backward_rms(grad_r: Tensor, x: Tensor, r: Tensor, q: Tensor, contract: str) -> Tensor:
    """The RMS leg of grad_x. p1: grad_r * (((-(r * r)) * x) / (K * q)); dsv4: grad_r * (((-((r * r) * r)) * x) / K).

    Where q is 0 the leg is +0.
    """
    size = _like(q, x.shape[-1])
    if is_dsv4(contract):
        factor, divisor = -((r * r) * r), size
    else:
        factor, divisor = -(r * r), size * q
    if is_fast(contract):  # one factor for the row
        leg = ((grad_r * factor) / divisor)[:, None] * x.float()
    else:
        leg = grad_r[:, None] * ((factor[:, None] * x.float()) / divisor[:, None])
    return torch.where(q[:, None] == 0, torch.zeros_like(leg), leg)


def backward_projection(grad_proj: Tensor, weight: Tensor, contract: str) -> Tensor:
    """The projection leg of grad_x: over ascending n from +0, of grad_proj[t, n] * weight[n, k]."""
    if is_fast(contract):
        return fast.fma_chain(grad_proj, weight)
    acc = grad_proj.new_zeros(grad_proj.shape[0], weight.shape[1])
    for n in range(weight.shape[0]):
        acc = acc + grad_proj[:, n, None] * weight[None, n]
    return acc


def backward_x(
    grad_proj: Tensor, grad_r: Tensor, x: Tensor, weight: Tensor, r: Tensor, q: Tensor, contract: str
) -> Tensor:
    """grad_x (T, K) FP32: projection leg + RMS leg."""
    return backward_projection(grad_proj, weight, contract) + backward_rms(grad_r, x, r, q, contract)


def backward_weight(grad_proj: Tensor, x: Tensor, start: Tensor | None, contract: str) -> Tensor:
    """grad_weight (N, K): over ascending rows, from +0 (+ ``start``), of grad_proj[t, n] * x[t, k]."""
    begin = grad_proj.new_zeros(grad_proj.shape[1], x.shape[1])
    if start is not None:
        begin = begin + start
    if is_fast(contract):
        return fast.project_rows(grad_proj, x, begin)
    acc = begin
    for part in _parts(len(x), acc.numel()):
        acc = fold.left_fold(grad_proj[part, :, None] * x[part, None].float(), 0, acc)
    return acc


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight, contract = inputs["x"], inputs["weight"], call.contract
    if not call.backward:
        for name, value in zip(("proj", "r", "q"), forward(x, weight, scalars["eps"], contract), strict=True):
            results[name].copy_(value)
        return
    if "grad_x" in results:
        saved = (inputs["r"], inputs["q"])
        results["grad_x"].copy_(backward_x(inputs["grad_proj"], inputs["grad_r"], x, weight, *saved, contract))
    if "grad_weight" in results:
        results["grad_weight"].copy_(backward_weight(inputs["grad_proj"], x, inputs.get("start_weight"), contract))
