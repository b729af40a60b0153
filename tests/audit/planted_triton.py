"""Triton kernels for the audit's own tests."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    a = tl.load(x + at, mask=live, other=1.0).to(tl.float32)
    b = tl.load(y + at, mask=live, other=0.0)
    tl.store(y + at, tl.div_rn(a * b + b, a), mask=live)


@triton.jit
def flushing_root(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    tl.store(y + at, tl.rsqrt(tl.load(x + at, mask=live, other=1.0).to(tl.float32)), mask=live)


SHIFT = tl.constexpr(3)


@triton.jit
def inner(a):
    return a + 1.0 + SHIFT


@triton.jit
def outer(a):
    return inner(a) * 2.0


@triton.jit
def calls_other(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, outer(tl.load(x + at, mask=at < n, other=1.0)), mask=at < n)
