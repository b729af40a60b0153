"""Defines the bits of ``adaln_projection``. One FP32 rounding per written operation; runs on any device.

``exp`` is the device's own; ``samebits.bits_of`` gives a CPU that of a GPU. The tensor core is an exact integer model
(:mod:`samebits.exact.tensor_core`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold, tensor_core
from samebits.exact.fma import fma

VECTOR, LANES = 8, 32
"""Contract ``fma``: elements of a vector, and lanes that take vectors in turn."""
CHAIN, CHAINS = 64, 8
"""grad_temb: outputs n of a chain, and chains of a partial."""
_HELD = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements in work at a time."""


def activation(temb: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(temb) = temb / (1 + exp(-temb)) in FP32, rounded once to the dtype of the weight."""
    return (temb / (torch.ones_like(temb) + elementary.exp(-temb))).to(dtype)


def forward(temb: Tensor, weight: Tensor, bias: Tensor, contract: str) -> Tensor:
    """table (T, N) in the dtype of weight; temb (T, D) FP32, weight (N, D), bias (N,)."""
    act = activation(temb, weight.dtype)
    if contract == "kchain":
        total = tensor_core.chain(act, weight)
        total = torch.where(total.isfinite(), total, torch.full_like(total, torch.nan))
    else:
        total = torch.cat([_lanes(act[rows], weight) for rows in _parts(len(act), LANES * len(weight), act)])
    return ((total + torch.zeros_like(total)) + bias.float()).to(weight.dtype)


def _parts(rows: int, row_size: int, like: Tensor) -> Iterator[slice]:
    """Consecutive rows, as many at a time as may be held; at least one part, which may be empty."""
    step = max(1, _HELD.get(like.device.type, _HELD["cpu"]) // max(1, row_size))
    for first in range(0, max(rows, 1), step):
        yield slice(first, first + step)


def _lanes(act: Tensor, weight: Tensor) -> Tensor:
    """(T, N) FP32: 32 chains over the vectors of D, and their tree."""
    padding = (0, -act.shape[1] % (VECTOR * LANES))
    a = torch.nn.functional.pad(act, padding).unflatten(1, (-1, LANES, VECTOR))
    w = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, LANES, VECTOR))
    acc = torch.zeros(len(act), len(weight), LANES, device=act.device)
    for turn in range(a.shape[1]):
        for e in range(VECTOR):
            acc = fma(a[:, None, turn, :, e].float(), w[None, :, turn, :, e].float(), acc)
    return fold.halving_tree(acc)


def backward_activation(grad: Tensor, weight: Tensor) -> Tensor:
    """(T, D) FP32, over n of grad[t, n] * weight[n, d]: chains of 64, partials of 8 chains, the fold of the partials.

    A padded product is +0 * +0, which at most turns a chain of -0 into +0, and the fold of the chains does that anyway.
    """
    padding = -weight.shape[0] % (CHAIN * CHAINS)
    g = torch.nn.functional.pad(grad, (0, padding)).unflatten(1, (-1, CHAIN))
    w = torch.nn.functional.pad(weight, (0, 0, 0, padding)).unflatten(0, (-1, CHAIN))
    return torch.cat([_fold_chains(g[rows], w) for rows in _parts(len(g), g.shape[1] * w.shape[-1], g)])


def _fold_chains(g: Tensor, w: Tensor) -> Tensor:
    """(T, D) FP32 of g (T, C, 64) and w (C, 64, D)."""
    acc = torch.zeros(len(g), w.shape[0], w.shape[2], device=g.device)
    for j in range(CHAIN):
        acc = fma(g[:, :, j, None], w[None, :, j].float(), acc)
    return fold.left_fold(fold.left_fold(acc.unflatten(1, (-1, CHAINS)), 2), 1)


def backward_temb(grad: Tensor, temb: Tensor, weight: Tensor) -> Tensor:
    """(T, D) FP32: (grad_act * s) * (1 + temb * (1 - s)), s = sigmoid(temb)."""
    gate = elementary.sigmoid(temb)
    one = torch.ones_like(temb)
    return (backward_activation(grad, weight) * gate) * (one + temb * (one - gate))


def backward_weight(grad: Tensor, act: Tensor) -> Tensor:
    """(N, D) FP32: the left fold over ascending rows of grad[t, n] * act[t, d]."""
    acc = torch.zeros(grad.shape[1], act.shape[1], device=grad.device)
    for g, a in zip(grad, act, strict=True):
        acc += g[:, None] * a
    return acc


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    temb, weight = inputs["temb"], inputs["weight"]
    if not call.backward:
        results["table"].copy_(forward(temb, weight, inputs["bias"], call.contract))
        return
    grad = inputs["grad_table"].float()
    if "grad_temb" in results:
        results["grad_temb"].copy_(backward_temb(grad, temb, weight))
    if "grad_weight" in results:
        results["grad_weight"].copy_(backward_weight(grad, activation(temb, weight.dtype).float()))
    if "grad_bias" in results:
        results["grad_bias"].copy_(fold.left_fold(grad, 0))
