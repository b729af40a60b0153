"""Summation orders, spelled out. Every sum of every reference is one of these; kernels repeat them.

Each function takes FP32 terms (already rounded) and adds one pair at a time, so an FP32 addition is rounded exactly
where the formula has a plus. Nothing here calls a library reduction, whose order is nobody's promise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def left_fold(terms: Tensor, dim: int, start: Tensor | None = None) -> Tensor:
    """acc = +0 (+ start); acc = acc + term, for ascending index along ``dim``. A start of -0 becomes +0."""
    ordered = terms.movedim(dim, 0).contiguous()
    acc = ordered.new_zeros(ordered.shape[1:])
    if start is not None:
        acc = acc + start
    for term in ordered:
        acc += term
    return acc


def tree4(terms: Tensor, dim: int) -> Tensor:
    """(t0 + t1) + (t2 + t3) along ``dim``, which must have size 4."""
    t0, t1, t2, t3 = terms.unbind(dim)
    return (t0 + t1) + (t2 + t3)


def halving_tree(partials: Tensor) -> Tensor:
    """Over the last axis (a power of two): p[u] = p[u] + p[u + half], half = n/2, n/4, ..., 1."""
    while partials.shape[-1] > 1:
        half = partials.shape[-1] // 2
        partials = partials[..., :half] + partials[..., half:]
    return partials[..., 0]


def strided_partials(terms: Tensor, lanes: int, width: int) -> Tensor:
    """``lanes`` partial sums over the last axis: elements in vectors of ``width``, vector v in partial v mod lanes.

    A partial left-folds its elements from +0 over ascending index. Padding with +0 changes no bit, because a sum that
    starts at +0 is never -0.
    """
    period = lanes * width
    size = terms.shape[-1]
    padded = torch.nn.functional.pad(terms, (0, -size % period))
    rounds = padded.view(*terms.shape[:-1], -1, lanes, width)
    acc = torch.zeros_like(rounds[..., 0, :, 0])
    for k in range(rounds.shape[-3]):
        for e in range(width):
            acc = acc + rounds[..., k, :, e]
    return acc


def tree512(terms: Tensor) -> Tensor:
    """512 partials of 8-wide vectors, then a halving tree, over the last axis."""
    return halving_tree(strided_partials(terms, lanes=512, width=8))


def tree256(terms: Tensor) -> Tensor:
    """256 partials of single elements; a halving tree inside each group of 32, then over the 8 groups, over the last axis."""
    partials = strided_partials(terms, lanes=256, width=1)
    groups = partials.view(*partials.shape[:-1], 8, 32)
    return halving_tree(halving_tree(groups))
