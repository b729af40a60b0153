"""What a Hopper tensor core computes on BF16 or FP16 operands, as exact arithmetic: the bits of a chain without a GPU.

The unit takes K in groups of 16. In one group the 16 exact products and the FP32 accumulator are aligned to the largest
exponent among them (the exponent of a product is the sum of the exponents of its factors), each is truncated toward zero
to 25 fractional bits, the 17 integers are added exactly, and the sum is truncated toward zero to FP32. The tile shape of
an instruction changes nothing.

Measured bit for bit on an H200 with random and wide-exponent BF16 data. At the edges the model follows what is known of the
unit (arXiv:2511.10909): a subnormal has the exponent of the smallest normal number; a product or an accumulator that is
zero does not take part in the alignment, which may therefore lie below that exponent, but not below 2^-133; a result below
the normal range is truncated to a multiple of 2^-149; what exceeds FP32 is infinite. All of this was compared on an H200, 4096
chains of four groups for each kind of operands; the bound of 2^-133 is what explains the 9 of 4096 sums of deep subnormal products
in which a model without it was wrong, and no neighbouring bound explains them. Non-finite
operands give a result that is not finite; which one is not promised. A sum of zero is +0 (of
one that is truncated to zero, the sign on the unit is not known). FP16 operands differ in their
exponents alone.

:func:`chain` is what references call. :func:`definition` is the model, spelled out in torch; on a CPU a compiled form with the
same bits does the work (:mod:`samebits.exact.compiled`), where the machine has a compiler for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samebits.exact import compiled
from samebits.exact.bits import bits

GROUP = 16
"""Products that one step of the unit adds at once."""
FRACTION = 25
"""Bits after the point that a term keeps when it is aligned."""
LOWEST = -126
"""Exponent of the smallest normal number, and of subnormals; FP16 has its own."""
_FORMATS = {torch.bfloat16: (7, 127), torch.float16: (10, 15)}
"""Fraction bits and exponent bias."""
DEEPEST = -133
"""No alignment lies below it, whatever the exponents are."""
NEVER = -4096
"""Exponent of what does not take part in the alignment."""
_HELD = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements of the result in work at a time: what stays in a cache, and what fills a GPU."""


def chain(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """start + sum over ascending k of a[..., m, k] * b[..., n, k], as the tensor core adds it: FP32 (..., M, N).

    ``a`` is (..., M, K) and ``b`` (..., N, K), both BF16 or both FP16, with the same leading axes. K is padded with zeros to
    whole groups. ``start`` is FP32 (..., M, N); absent means +0. Memory stays bounded; CPU and CUDA tensors give the same bits.
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in _FORMATS:
            raise TypeError(f"{name} must be bfloat16 or float16, not {operand.dtype}")
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b {b.dtype}; they must agree")
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} must agree in all axes but the last but one")
    lead, m, n = a.shape[:-2], a.shape[-2], b.shape[-2]
    if a.device.type != "cpu" or compiled.missing() is not None:
        return definition(a, b, start)
    out = torch.zeros(*lead, m, n) if start is None else start.float().expand(*lead, m, n).contiguous().clone()
    if a.shape[-1] == 0:
        return out
    left, right, sums = (t.contiguous().flatten(0, -3) if lead else t.contiguous()[None] for t in (a, b, out))
    for one, other, total in zip(left, right, sums, strict=True):
        compiled.chain(one, other, total)
    return out.add_(0.0)


def definition(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """:func:`chain` of operands that it accepts, in torch's FP64, which holds every step exactly."""
    lead, (m, k), n = a.shape[:-2], a.shape[-2:], b.shape[-2]
    count = math.prod(lead)
    out = torch.zeros(count, m, n, device=a.device)
    if start is not None:
        out.copy_(start.reshape(count, m, n))
    if out.numel() == 0 or k == 0:
        return out.view(*lead, m, n)
    left, right = _steps(a.reshape(count, m, k)), _steps(b.reshape(count, n, k))
    held = _HELD.get(a.device.type, _HELD["cpu"])
    rows = max(1, min(m, held // n))
    batches = max(1, held // (rows * n))
    for first in range(0, count, batches):
        for row in range(0, m, rows):
            here = (slice(first, first + batches), slice(row, row + rows))
            chosen = (left[:, :, here[0], here[1], None], right[:, :, here[0], None])
            out[here] = block(*chosen, out[here])
    return out.add_(0.0).view(*lead, m, n)


def _steps(operand: Tensor) -> Tensor:
    """(batch, rows, K) as (groups, 16, batch, rows), padded with zeros: one slice per product of a group."""
    padded = torch.nn.functional.pad(operand, (0, -operand.shape[-1] % GROUP))
    return padded.unflatten(-1, (-1, GROUP)).permute(2, 3, 0, 1).contiguous()


def block(left: Tensor, right: Tensor, acc: Tensor) -> Tensor:
    """All groups: (groups, 16, batch, M, 1) and (groups, 16, batch, 1, N) onto (batch, M, N) FP32."""
    for a, b in zip(left, right, strict=True):
        acc = _step(a, b, acc)
    return acc


def _step(left: Tensor, right: Tensor, acc: Tensor) -> Tensor:
    """One group: (16, batch, M, 1) and (16, batch, 1, N) BF16 onto (batch, M, N) FP32.

    FP64 holds everything exactly: a product has at most 22 significant bits, an aligned term fewer than 28, their sum fewer
    than 32, and scaling is by powers of two.
    """
    top = _exponents_fp32(acc)
    for a, b in zip(exponents(left), exponents(right), strict=True):
        torch.maximum(top, a + b, out=top)
    scale = _power_of_two(FRACTION - top.clamp(min=DEEPEST))
    total = (acc.double() * scale).trunc_()
    for a, b in zip(left.double(), right.double(), strict=True):
        total += (a * b).mul_(scale).trunc_()
    return _truncate_to_fp32(total.div_(scale))


def exponents(values: Tensor) -> Tensor:
    """int16, of BF16 or FP16; a zero takes its products out of the alignment."""
    fraction, bias = _FORMATS[values.dtype]
    field = (bits(values) >> fraction) & ((1 << 15 - fraction) - 1)
    return torch.where(values == 0, NEVER, (field - bias).clamp(min=1 - bias))


def _exponents_fp32(values: Tensor) -> Tensor:
    """int16; a zero takes no part in the alignment."""
    field = (bits(values) >> 23) & 0xFF
    return torch.where(values == 0, NEVER, (field - 127).clamp(min=LOWEST)).to(torch.int16)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as FP64, from its bit pattern: library functions for it are not exact everywhere."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _truncate_to_fp32(values: Tensor) -> Tensor:
    """FP64 to FP32 toward zero: 24 significant bits, and no bit below 2^-149. Beyond FP32 it is infinite."""
    kept = (values.view(torch.int64) & -(1 << 29)).view(torch.float64)
    kept = torch.where(values.isfinite(), kept, values)
    return (kept * 2.0**149).trunc_().mul_(2.0**-149).float()
