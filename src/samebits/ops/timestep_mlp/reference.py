"""Defines the bits of ``timestep_mlp``. One FP32 rounding per written operation; runs on any device.

``exp`` is the device's own; ``samebits.bits_of`` gives a CPU that of a GPU. A fused multiply-add is
:func:`samebits.exact.fma.fma`, which needs no such instruction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold
from samebits.exact.fma import fma

LANES, VECTOR, CHUNK = 32, 4, 64
_MOST = 2**23
"""Partial sums that exist at the same time; rows are taken in parts to stay below."""


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, K], weight [N, K], bias [N] to [T, N]: 32 lanes of vectors of 4, a halving tree, then the bias."""
    period = LANES * VECTOR
    padding = (0, -x.shape[-1] % period)  # fma(0, 0, sum) changes no sum but -0, and the + 0 below does that anyway
    x, weight = torch.nn.functional.pad(x, padding), torch.nn.functional.pad(weight, padding)
    rows = max(1, _MOST // (weight.shape[0] * LANES))
    return torch.cat([_linear(part, weight, bias) for part in x.split(rows)])


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x, weight = (t.unflatten(-1, (-1, LANES, VECTOR)).movedim(-2, -1).flatten(1, 2) for t in (x, weight))
    sums = x.new_zeros(x.shape[0], weight.shape[0], LANES)
    for k in range(x.shape[1]):
        sums = fma(x[:, None, k], weight[None, :, k], sums)
    return fold.halving_tree(sums + 0.0) + bias


def silu(z: Tensor) -> Tensor:
    return z / (1 + elementary.exp(-z))


def silu_slope(z: Tensor) -> Tensor:
    """s * (1 + z * (1 - s)) with s = 1 / (1 + exp(-z))."""
    s = torch.ones_like(z) / (1 + elementary.exp(-z))
    return s * (1 + z * (1 - s))


def forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y [T, D], pre [T, F], act [T, F])."""
    pre = linear(x, w1, b1)
    act = silu(pre)
    return linear(act, w2, b2), pre, act


def across(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [T, N], weight [N, K] to grad @ weight [T, K]: chunks of 64 terms, left-folded."""
    padding = -grad.shape[-1] % CHUNK
    grad = torch.nn.functional.pad(grad, (0, padding)).unflatten(-1, (-1, CHUNK))
    weight = torch.nn.functional.pad(weight, (0, 0, 0, padding)).unflatten(0, (-1, CHUNK))
    rows = max(1, _MOST // (weight.shape[0] * weight.shape[-1]))
    return torch.cat([_across(part, weight) for part in grad.split(rows)])


def _across(grad: Tensor, weight: Tensor) -> Tensor:
    sums = grad.new_zeros(grad.shape[0], weight.shape[0], weight.shape[-1])
    for n in range(CHUNK):
        sums = fma(grad[:, :, n, None], weight[None, :, n], sums)
    return fold.left_fold(sums, 1)


def weight_gradient(grad: Tensor, given: Tensor) -> Tensor:
    """grad [T, N], given [T, K] to grad^T @ given [N, K]: one chain over ascending rows."""
    total = grad.new_zeros(grad.shape[-1], given.shape[-1])
    for g, a in zip(grad, given, strict=True):
        total = fma(g[:, None], a[None], total)
    return total


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    if not call.backward:
        for name, value in zip(("y", "pre", "act"), forward(*inputs.values()), strict=True):
            results[name].copy_(value)
        return
    grad_y, act = inputs["grad_y"], inputs["act"]
    if "grad_w2" in results:
        results["grad_w2"].copy_(weight_gradient(grad_y, act))
    if "grad_b2" in results:
        results["grad_b2"].copy_(fold.left_fold(grad_y, 0))
    if not results.keys() & {"grad_x", "grad_w1", "grad_b1"}:
        return
    grad_pre = across(grad_y, inputs["w2"]) * silu_slope(inputs["pre"])
    if "grad_w1" in results:
        results["grad_w1"].copy_(weight_gradient(grad_pre, inputs["x"]))
    if "grad_b1" in results:
        results["grad_b1"].copy_(fold.left_fold(grad_pre, 0))
    if "grad_x" in results:
        results["grad_x"].copy_(across(grad_pre, inputs["w1"]))
