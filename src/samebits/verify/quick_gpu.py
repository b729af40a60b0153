"""The kernels of :mod:`samebits.verify.quick`. No operator uses them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.exact import tensor_core

BLOCK = 128
AHEAD = 8
"""Terms that are loaded before they are added."""
TILE = 16


@triton.jit
def _left_fold(terms, start, out, count, chains, HAS_START: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    chain = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = chain < chains
    at = chain
    acc = tl.zeros((BLOCK,), tl.float32)
    if HAS_START:
        acc = acc + tl.load(start + chain, mask=inside, other=0.0)
    for _ in range(count // AHEAD):
        for _ahead in tl.static_range(AHEAD):
            acc = acc + tl.load(terms + at, mask=inside, other=0.0)
            at += chains
    for _ in range(count % AHEAD):
        acc = acc + tl.load(terms + at, mask=inside, other=0.0)
        at += chains
    tl.store(out + chain, acc, mask=inside)


def left_fold(terms: Tensor, dim: int, start: Tensor | None = None) -> Tensor:
    ordered = terms.movedim(dim, 0).contiguous()
    assert ordered.dtype == torch.float32
    out = ordered.new_empty(ordered.shape[1:])
    begin = None if start is None else start.expand(out.shape).contiguous()
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _left_fold[grid](ordered, begin, out, len(ordered), out.numel(), begin is not None, BLOCK, AHEAD)
    return out


@triton.jit
def _fma(a, b, c, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    product = tl.load(a + at, mask=inside), tl.load(b + at, mask=inside)
    tl.store(out + at, tl.fma(product[0], product[1], tl.load(c + at, mask=inside)), mask=inside)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = (t.contiguous() for t in torch.broadcast_tensors(a, b, c))
    assert {a.dtype, b.dtype, c.dtype} == {torch.float32}
    out = torch.empty_like(c)
    if out.numel():
        _fma[(triton.cdiv(out.numel(), 8 * BLOCK),)](a, b, c, out, out.numel(), 8 * BLOCK)
    return out


@triton.jit
def _truncated(value):  # type: ignore[no-untyped-def]
    return tl.where(value < 0, tl.ceil(value), tl.floor(value))


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    left, left_exp, right, right_exp, acc, groups, batches, m, n,
    GROUP: tl.constexpr, FRACTION: tl.constexpr, LOWEST: tl.constexpr, DEEPEST: tl.constexpr,
    NEVER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = acc + (batch * m + row[:, None]) * n + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    total = tl.load(place, mask=inside, other=0.0)
    lowest = tl.full((1, 1), 149, tl.int32)
    step = batch
    for _ in range(groups):
        word = total.to(tl.int32, bitcast=True)
        field = tl.maximum(((word >> 23) & 0xFF) - 127, LOWEST)
        top = tl.where(total == 0.0, NEVER, field)
        for k in tl.static_range(GROUP):
            a = tl.load(left_exp + (step + k * batches) * m + row, mask=row < m, other=0).to(tl.int32)
            b = tl.load(right_exp + (step + k * batches) * n + column, mask=column < n, other=0).to(tl.int32)
            top = tl.maximum(top, a[:, None] + b[None, :])
        top = tl.maximum(top, DEEPEST)
        scale = _power_of_two(FRACTION - top)
        wide = _truncated(total.to(tl.float64) * scale)
        for k in tl.static_range(GROUP):
            a = tl.load(left + (step + k * batches) * m + row, mask=row < m, other=0.0)
            b = tl.load(right + (step + k * batches) * n + column, mask=column < n, other=0.0)
            wide = wide + _truncated((a[:, None] * b[None, :]) * scale)
        wide = wide * _power_of_two(top - FRACTION)
        # Toward zero to FP32: 24 significant bits, and no bit below 2^-149.
        kept = (wide.to(tl.int64, bitcast=True) & -0x20000000).to(tl.float64, bitcast=True)
        total = (_truncated(kept * _power_of_two(lowest)) * _power_of_two(-lowest)).to(tl.float32)
        step += GROUP * batches
    tl.store(place, total, mask=inside)


def block(left: Tensor, right: Tensor, acc: Tensor) -> Tensor:
    """:func:`samebits.exact.tensor_core.block` in one launch."""
    out = acc.contiguous().clone()
    batches, m, n = out.shape
    a, b = left.squeeze(-1).contiguous(), right.squeeze(-2).contiguous()
    operands = (a.double(), tensor_core.exponents(a).contiguous(), b.double(), tensor_core.exponents(b).contiguous())
    grid = (triton.cdiv(m, TILE), triton.cdiv(n, TILE), batches)
    _block[grid](
        *operands, out, len(a), batches, m, n,
        tensor_core.GROUP, tensor_core.FRACTION, tensor_core.LOWEST, tensor_core.DEEPEST, tensor_core.NEVER, TILE,
    )  # fmt: skip
    return out
