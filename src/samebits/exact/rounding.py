"""FP32 to BF16 and FP16 in integers: round to nearest, ties to even. Says what a cast must do; no cast is used to say it."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.exact.bits import bits


def _nearest_even(value: Tensor, dropped: Tensor | int) -> Tensor:
    """``value / 2**dropped`` rounded to the nearest integer, ties to even; ``dropped`` >= 1."""
    dropped = torch.as_tensor(dropped)
    kept = value >> dropped
    half = torch.ones_like(value) << (dropped - 1)
    rest = value - (kept << dropped)
    up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    return kept + up.to(kept.dtype)


def to_bfloat16(values: Tensor) -> Tensor:
    """FP32 to BF16. Overflow rounds to infinity; every NaN becomes the quiet NaN 0x7fc0."""
    word = bits(values).to(torch.int64) & 0xFFFFFFFF
    rounded = _nearest_even(word, 16)
    return _pack(torch.where(values.isnan(), 0x7FC0, rounded), torch.bfloat16)


def to_float16(values: Tensor) -> Tensor:
    """FP32 to FP16, subnormals included. Overflow rounds to infinity; every NaN becomes the quiet NaN 0x7e00."""
    word = bits(values).to(torch.int64) & 0xFFFFFFFF
    sign, exponent, fraction = word >> 31, (word >> 23) & 0xFF, word & 0x7FFFFF
    # 112 = 127 - 15 moves the bias; below it the result is subnormal and more bits are dropped, at most all of them.
    normal = _nearest_even(((exponent - 112).clamp(min=0) << 23) | fraction, 13)
    subnormal = _nearest_even(fraction | (1 << 23), (14 + 112 - exponent).clamp(13, 30))
    magnitude = torch.where(exponent > 112, normal, torch.where(exponent == 0, 0, subnormal)).clamp(max=0x7C00)
    magnitude = torch.where(values.isnan(), 0x7E00, magnitude)
    return _pack(torch.where(values.isnan(), magnitude, magnitude | (sign << 15)), torch.float16)


def _pack(word: Tensor, dtype: torch.dtype) -> Tensor:
    return ((word + 0x8000) % 0x10000 - 0x8000).to(torch.int16).view(dtype)
