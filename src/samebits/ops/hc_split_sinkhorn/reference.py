"""Defines the bits of ``hc_split_sinkhorn``. One FP32 rounding per written operation; runs on any device.

``exp`` and ``sigmoid`` are the device's own; ``samebits.bits_of`` gives a CPU those of a GPU.
Every division is tensor by tensor: tensor / python-number would be a product with the reciprocal on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold

STREAMS = 4
EPS = 1e-6
ITERATIONS = 20
"""Column steps; a row step stands between each two of them. Fixed by the contract, like EPS and the factor 2 of POST."""

OVER_SOURCES, OVER_DESTINATIONS = -2, -1
STEPS = (OVER_SOURCES,) + (OVER_DESTINATIONS, OVER_SOURCES) * (ITERATIONS - 1)
"""The axis that each of the 39 normalisations sums over, in order: columns first and last."""


def _plus_eps(value: Tensor) -> Tensor:
    return value + torch.full_like(value, EPS)


def split(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 24 controller outputs of each token as (pre [T, 4], post [T, 4], comb [T, 4, 4])."""
    pre, post, comb = logits.split((STREAMS, STREAMS, STREAMS * STREAMS), dim=-1)
    return pre, post, comb.unflatten(-1, (STREAMS, STREAMS))


def softmax(comb_logits: Tensor) -> Tensor:
    """Over the destination j: exp(l - max) / ((e0 + e1) + (e2 + e3)). The maximum lets NaN through."""
    l0, l1, l2, l3 = comb_logits.unbind(-1)
    largest = torch.maximum(torch.maximum(l0, l1), torch.maximum(l2, l3))
    exponentials = elementary.exp(comb_logits - largest[..., None])
    return exponentials / fold.tree4(exponentials, -1)[..., None]


def sinkhorn(matrix: Tensor) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
    """The 39 normalisations. Returns the last matrix, and for each step (axis, matrix before it, its denominators)."""
    trajectory = []
    for axis in STEPS:
        denominator = _plus_eps(fold.tree4(matrix, axis)).unsqueeze(axis)
        trajectory.append((axis, matrix, denominator))
        matrix = matrix / denominator
    return matrix, trajectory


def forward(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, 24] to (pre [T, 4], post [T, 4], comb [T, 4, 4]), FP32; comb[i, j] leads from stream i to stream j."""
    pre, post, comb = split(logits)
    matrix, _ = sinkhorn(_plus_eps(softmax(comb)))
    return _plus_eps(_sigmoid(pre)), 2 * _sigmoid(post), matrix


def _sigmoid(x: Tensor) -> Tensor:
    """torch's own, with which the published digests were made on a CPU; on a GPU it is that of ``exact.elementary``."""
    return elementary.sigmoid(x) if elementary.modelled(x) else torch.sigmoid(x)


def _sigmoid_slope(logits: Tensor) -> Tensor:
    value = _sigmoid(logits)
    return value * (torch.ones_like(value) - value)


def backward(grad_pre: Tensor, grad_post: Tensor, grad_comb: Tensor, logits: Tensor) -> Tensor:
    """grad_logits [T, 24], FP32. Everything is recomputed from the logits; the 39 steps are walked back one by one.

    A step M / c with c = sum(M) + eps has the gradient G / c - sum(G * M) / (c * c). The softmax treats the row maximum as
    a constant, which changes nothing mathematically: the softmax does not depend on it.
    """
    pre, post, comb = split(logits)
    probabilities = softmax(comb)
    _, trajectory = sinkhorn(_plus_eps(probabilities))
    grad = grad_comb
    for axis, matrix, denominator in reversed(trajectory):
        along = fold.tree4(grad * matrix, axis).unsqueeze(axis)
        grad = grad / denominator - along / (denominator * denominator)
    inner = fold.tree4(grad * probabilities, -1)[..., None]
    grad_comb_logits = probabilities * (grad - inner)
    return torch.cat(
        (
            grad_pre * _sigmoid_slope(pre),
            grad_post * (2 * _sigmoid_slope(post)),
            grad_comb_logits.flatten(-2),
        ),
        dim=-1,
    )


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    logits = inputs["logits"]
    if not call.backward:
        for name, value in zip(("pre", "post", "comb"), forward(logits), strict=True):
            results[name].copy_(value)
        return
    if "grad_logits" in results:
        grad_logits = backward(inputs["grad_pre"], inputs["grad_post"], inputs["grad_comb"], logits)
        results["grad_logits"].copy_(grad_logits)
