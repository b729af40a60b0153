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
