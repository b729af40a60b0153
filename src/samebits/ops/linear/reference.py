"""Defines the bits of ``linear``: the exact model of the tensor core (:mod:`samebits.exact.tensor_core`), on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import fold, tensor_core


def product(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """(R, C) FP32 of a (R, S) and b (C, S): a chain per element, NaN where it is not finite, never -0."""
    total = tensor_core.chain(a, b, start)
    total = torch.where(total.isfinite(), total, torch.full_like(total, torch.nan))
    return total + torch.zeros_like(total)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y (T, N) in FP32, not yet rounded; x (T, K), weight (N, K), bias (N,)."""
    total = product(x, weight)
    return total if bias is None else total + bias.float()


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    if not call.backward:
        results["y"].copy_(forward(x, weight, inputs.get("bias")))
        return
    grad = inputs["grad_y"]
    if "grad_x" in results:
        results["grad_x"].copy_(product(grad, weight.T))
    if "grad_weight" in results:
        results["grad_weight"].copy_(product(grad.T, x.T, inputs.get("start_weight")))
    if "grad_bias" in results:
        results["grad_bias"].copy_(fold.left_fold(grad.float(), 0, inputs.get("start_bias")))


def together(calls: Sequence[Call], plans: Sequence[None]) -> None:
    """How several calls run as one: one by one."""


def run_together(
    calls: Sequence[Call],
    plan: None,
    inputs: Sequence[dict[str, Tensor]],
    results: Sequence[dict[str, Tensor]],
) -> None:
    for call, given, made in zip(calls, inputs, results, strict=True):
        run(call, None, given, made, {})
