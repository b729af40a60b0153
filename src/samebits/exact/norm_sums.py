"""The two sums that a norm of rows needs, over the last axis, each in the one order that its contract states."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.exact import fold
from samebits.exact.fma import fma

CHAINS, VECTOR = 128, 4


def squares_of_torch_norm(x: Tensor) -> Tensor:
    """Sum of x*x, FP32, in the order of torch's vectorised CUDA norm kernels.

    Columns in vectors of 4; vector v belongs to chain v mod 128; a chain adds its squares by fused multiply-add from +0 over
    ascending columns. Four groups of 32 chains, each by the halving tree 16, 8, 4, 2, 1; then (g0 + g2) + (g1 + g3).
    """
    used = min(CHAINS, -(-x.shape[-1] // VECTOR))  # the others stay +0
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % (used * VECTOR)))  # fma(0, 0, s) = s wherever a chain can be
    rounds = padded.view(*x.shape[:-1], -1, used, VECTOR)
    acc = torch.zeros_like(rounds[..., 0, :, 0])
    for k in range(rounds.shape[-3]):
        for e in range(VECTOR):
            term = rounds[..., k, :, e]
            acc = fma(term, term, acc)
    acc = torch.nn.functional.pad(acc, (0, CHAINS - used))
    groups = fold.halving_tree(acc.view(*acc.shape[:-1], 4, 32))
    return fold.halving_tree(groups)


def vector_tree(terms: Tensor) -> Tensor:
    """Sum of FP32 terms, each already rounded: vectors of 8 consecutive ones are chains from +0; 32 consecutive vectors the
    halving tree 16, 8, 4, 2, 1; those groups of 256 a left fold from +0."""
    padded = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % 256))
    vectors = fold.left_fold(padded.view(*terms.shape[:-1], -1, 32, 8), -1)
    return fold.left_fold(fold.halving_tree(vectors), -1)
