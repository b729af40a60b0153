"""The instructions behind :mod:`samebits.exact.special`, on CUDA tensors. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.runtime.triton_launch import kernel, launch

_BLOCK = 1024


@kernel
def _elementwise(x, y, N: tl.int64, INSTRUCTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < N, other=1.0)
    result = tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y + i, result, mask=i < N)


def apply(instruction: str, x: Tensor) -> Tensor:
    """One PTX instruction ``op $0, $1;`` on every element of FP32 ``x``."""
    dense = x.contiguous()
    y = torch.empty_like(dense)
    if y.numel():
        blocks = (triton.cdiv(y.numel(), _BLOCK),)
        with torch.cuda.device(x.device):
            launch(_elementwise, blocks, dense, y, y.numel(), num_warps=4, INSTRUCTION=instruction, BLOCK=_BLOCK)
    return y
