"""Defines the sums of the ``fast`` contracts: exact products on the tensor cores, short chains, a fixed tree.

The tensor core is an exact integer model here (:mod:`samebits.exact.tensor_core`), so these bits can be had anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.exact import tensor_core
from samebits.exact.bits import bits
from samebits.exact.fma import fma

CHUNK = 256
"""Terms of one chain."""
SEGMENTS = 16
"""Leaves of the tree over the chunks of K."""


def split(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(high, middle, low): BF16 pieces of FP32 values, each the truncation of what the ones before left.

    Their sum is the value, but for bits below 2^-133, which BF16 does not have.
    """
    high = _upper(values)
    middle = _upper(values - high)
    low = _upper((values - high) - middle)
    return high.bfloat16(), middle.bfloat16(), low.bfloat16()


def _upper(values: Tensor) -> Tensor:
    return (bits(values) & -0x10000).view(torch.float32)


def canonical(values: Tensor) -> Tensor:
    """What is not finite becomes the quiet NaN 0x7fc00000: infinities of a tensor core are nobody's promise."""
    return torch.where(values.isfinite(), values, torch.full_like(values, torch.nan))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """proj (T, N) FP32 of x (T, K) BF16 and weight (N, K) FP32."""
    rows = _chunks(x)
    high, middle, low = (tensor_core.chain(rows, _chunks(piece)) for piece in split(weight))
    return canonical(tree(segments(high + (middle + low))))


def sum_of_squares(x: Tensor) -> Tensor:
    """(T,) FP32: the sum over k of x * x, by fused multiply-adds. x is (T, K) BF16."""
    halves = _chunks(x).float().unflatten(-1, (CHUNK // 16, 2, 4, 2))  # chunk, row, i, half, q, element
    ordered = halves.permute(2, 3, 5, 0, 1, 4).flatten(0, 2)  # ascending k within a partial; then chunk, row, q
    acc = torch.zeros_like(ordered[0])
    for term in ordered:
        acc = fma(term, term, acc)
    p0, p1, p2, p3 = acc.unbind(-1)
    return tree(segments((p0 + p1) + (p2 + p3)))


def _chunks(rows: Tensor) -> Tensor:
    """(R, K) as (chunks, R, 256), padded with zeros."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).movedim(1, 0)


def segments(chunks: Tensor) -> Tensor:
    """(chunks, ...) to (16, ...): contiguous runs of ceil(chunks / 16), each left-folded from +0; empty ones are +0."""
    length = -(-chunks.shape[0] // SEGMENTS)
    sums = chunks.new_zeros(SEGMENTS, *chunks.shape[1:])
    for i, chunk in enumerate(chunks):
        sums[i // length] += chunk
    return sums


def tree(parts: Tensor) -> Tensor:
    """Over the first axis, a power of two: neighbours are added, then neighbours of the sums, and so on."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def fma_chain(grad_proj: Tensor, weight: Tensor) -> Tensor:
    """(T, K) FP32: over ascending n from +0, fused multiply-adds of grad_proj[t, n] * weight[n, k]."""
    acc = grad_proj.new_zeros(grad_proj.shape[0], weight.shape[1])
    for n in range(weight.shape[0]):
        acc = fma(grad_proj[:, n, None], weight[None, n], acc)
    return acc


def project_rows(grad_proj: Tensor, x: Tensor, start: Tensor) -> Tensor:
    """grad_weight (N, K) FP32 of grad_proj (T, N) FP32 and x (T, K) BF16: chunks of 256 rows, added to ``start``.

    A fold over several batches is the fold over all of their rows where each batch but the last is a multiple of 256.
    """
    acc = start
    for first in range(0, x.shape[0], CHUNK):
        rows = x[first : first + CHUNK].T
        high, middle, low = (tensor_core.chain(g.T, rows) for g in split(grad_proj[first : first + CHUNK]))
        acc = acc + (high + (middle + low))
    return canonical(acc)
