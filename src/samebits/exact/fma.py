"""Fused multiply-add of FP32 with one correct rounding, on any device and without the instruction."""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, FP32, rounded once to nearest even. Shapes broadcast; subnormals, zeros and infinities as IEEE 754 says."""
    return rounded_once(a, b, c)


def rounded_once(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """:func:`fma`, in FP64.

    The product of two FP32 is exact in FP64. Its sum with ``c`` is rounded there to odd: an inexact result gets the
    neighbour with an odd last bit, which can be neither a tie nor an exact value of FP32, so that the second rounding
    sees on which side the true sum lies.
    """
    a, b, c = torch.broadcast_tensors(a, b, c)
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # What the rounding of the sum lost, exactly (Knuth). NaN where the sum is not finite.
    shadow = total - product
    lost = product.sub_(total - shadow).add_(addend - shadow)
    word = total.view(torch.int64)
    inexact_and_even = (lost.abs() > 0) & ((word & 1) == 0)
    # The odd neighbour is further from zero where the sum and what it lost have one sign, else nearer.
    step = ((lost.view(torch.int64) ^ word) >> 63) | 1
    return word.add_(step.mul_(inexact_and_even)).view(torch.float64).float()
