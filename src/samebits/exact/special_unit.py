"""The instructions behind :mod:`samebits.exact.special`, on CUDA tensors. Imports triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.runtime.triton_launch import kernel, launch

_BLOCK = 1024


@kernel
def _ex2(x, y, N: tl.int64, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < N, other=0.0)
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + i, power, mask=i < N)


@kernel
def _rcp(x, y, N: tl.int64, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < N, other=1.0)
    quotient = tl.inline_asm_elementwise(
        "div.full.f32 $0, 0f3F800000, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + i, quotient, mask=i < N)


@kernel
def _rsqrt(x, y, N: tl.int64, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < N, other=1.0)
    root = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + i, root, mask=i < N)


def ex2(x: Tensor) -> Tensor:
    return _elementwise(_ex2, x)


def rcp(x: Tensor) -> Tensor:
    return _elementwise(_rcp, x)


def rsqrt(x: Tensor) -> Tensor:
    return _elementwise(_rsqrt, x)


def _elementwise(function: Any, x: Tensor) -> Tensor:
    dense = x.contiguous()
    y = torch.empty_like(dense)
    if y.numel():
        with torch.cuda.device(x.device):
            launch(function, (triton.cdiv(y.numel(), _BLOCK),), dense, y, y.numel(), num_warps=4, BLOCK=_BLOCK)
    return y
