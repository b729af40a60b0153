"""Elementary functions of the GPU's special-function unit by name, so that a reference says which instruction it means.

On a CUDA tensor each function is the instruction itself. On a CPU it is the value that the unit of an H200 gives, from tables
that were read out of one (``special_sm_90.xz``): for each of the 2^23 fractions the difference from the correctly rounded value,
in units in the last place. What the unit does with the rest of an argument was found by comparing all fractions at others:

* ``ex2``: the argument is cut to 23 bits behind the point, toward zero; of a negative one that is no integer and of which something
  is left the one's complement is taken. The integer becomes the exponent, the fraction chooses the mantissa.
* ``rcp``: the mantissa of the result depends on that of the argument alone.
* ``rsqrt``: on the mantissa and on whether the exponent is odd.

:func:`log2_portable` needs no unit: it is IEEE arithmetic in a fixed order, with the same bits everywhere.
"""

from __future__ import annotations

import functools
import lzma
import math
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

SMALLEST_NORMAL = 2.0**-126
TABLES = ("ex2", "rcp", "rsqrt of even exponents", "rsqrt of odd exponents")
"""As they follow one another in the file, one byte for each fraction."""
FRACTIONS = 2**23


def ex2_approx(x: Tensor) -> Tensor:
    """2^x, FP32: ``ex2.approx.ftz.f32``. A subnormal argument is zero, a result below 2^-126 is +0."""
    _need_fp32(x)
    return _instruction("ex2.approx.ftz.f32 $0, $1;", x) if x.is_cuda else ex2_of_table(x)


def rcp_approx(x: Tensor) -> Tensor:
    """1 / x, FP32: ``div.full.f32 1, x``: the unit's reciprocal, of an x scaled by 2^24 below 2^-126 and by 1/4 above 2^126."""
    _need_fp32(x)
    return _instruction("div.full.f32 $0, 0f3F800000, $1;", x) if x.is_cuda else rcp_of_table(x)


def rsqrt_approx(x: Tensor) -> Tensor:
    """1 / sqrt(x), FP32: ``rsqrt.approx.ftz.f32``. A subnormal argument counts as zero: infinity."""
    _need_fp32(x)
    return _instruction("rsqrt.approx.ftz.f32 $0, $1;", x) if x.is_cuda else rsqrt_of_table(x)


def ex2_of_table(x: Tensor) -> Tensor:
    """:func:`ex2_approx` by the table, on any device."""
    wide = torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x).double()
    cut = (wide.nan_to_num(0.0).clamp(-256.0, 256.0).abs() * FRACTIONS).floor().long()
    fixed = torch.where(wide < 0, torch.where((wide == wide.floor()) | (cut == 0), -cut, ~cut), cut)
    whole, fraction = fixed >> 23, fixed & (FRACTIONS - 1)
    value = (_powers(x.device)[fraction] + (whole.clamp(-126, 127) << 23)).int().view(torch.float32)
    value = torch.where(whole < -126, 0.0, torch.where(whole > 127, math.inf, value))
    return torch.where(x.isnan(), x, value)


def rcp_of_table(x: Tensor) -> Tensor:
    """:func:`rcp_approx` by the table, on any device."""
    size = x.abs()
    scale = torch.where(size < SMALLEST_NORMAL, 2.0**24, torch.where(size > 1.0 / SMALLEST_NORMAL, 0.25, 1.0)).to(x)
    inner = x * scale
    quotient = 1.0 / inner
    ulps = _ulps("rcp", x.device)[(inner.view(torch.int32) & (FRACTIONS - 1)).long()]
    corrected = (quotient.view(torch.int32) + ulps).view(torch.float32)
    return torch.where(inner.isfinite() & (inner != 0), corrected, quotient) * scale


def rsqrt_of_table(x: Tensor) -> Tensor:
    """:func:`rsqrt_approx` by the table, on any device."""
    word = x.contiguous().view(torch.int32)
    fraction, odd = (word & (FRACTIONS - 1)).long(), (word >> 23) & 1 == 0  # biased by an odd number
    even_ulps, odd_ulps = (_ulps(name, x.device)[fraction] for name in TABLES[2:])
    ulps = torch.where(odd, odd_ulps, even_ulps)
    root = (1.0 / x.double().sqrt()).float()
    corrected = (root.contiguous().view(torch.int32) + ulps).view(torch.float32)
    tiny = torch.copysign(torch.full_like(x, math.inf), x)
    ordinary = torch.where(x.isfinite() & (x >= SMALLEST_NORMAL), corrected, root)
    return torch.where(x.abs() < SMALLEST_NORMAL, tiny, ordinary)


LOG2_SERIES = tuple(2.0 / (math.log(2.0) * (2 * k + 1)) for k in range(5))
"""log2(f) = z (c0 + c1 z^2 + c2 z^4 + ...), z = (f - 1) / (f + 1): the series of the inverse hyperbolic tangent."""


def log2_portable(x: Tensor) -> Tensor:
    """log2(x) of positive normal FP32, within 1.5e-7 of max(1, |log2 x|): IEEE operations alone, each rounded once.

    x = 2^e f with 0.6875 < f <= 1.375; the series by Horner's rule in z^2; then z * p; then e + that. Infinity and NaN stay.
    """
    _need_fp32(x)
    word = x.view(torch.int32)
    fraction = ((word & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    upper = fraction > LOG2_SPLIT
    exponent = (word >> 23) - 127 + upper.int()
    f = torch.where(upper, 0.5 * fraction, fraction)
    z = (f - 1.0) / (f + 1.0)
    w = z * z
    p = torch.full_like(x, LOG2_SERIES[-1])
    for coefficient in reversed(LOG2_SERIES[:-1]):
        p = p * w + coefficient
    return torch.where(x < math.inf, exponent.float() + z * p, x)


LOG2_SPLIT = 1.375


def _instruction(text: str, x: Tensor) -> Tensor:
    from samebits.exact import special_unit

    return special_unit.apply(text, x)


def _need_fp32(x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"x must be torch.float32, not {x.dtype}")


@functools.cache
def _powers(device: torch.device) -> Tensor:
    """(2^23,) int32: the bits of what the unit gives for each fraction."""
    exact = _ex2_rounded(torch.arange(FRACTIONS, dtype=torch.float64) / FRACTIONS).view(torch.int32)
    return exact.to(device) + _ulps("ex2", device)


def _ex2_rounded(x: Tensor) -> Tensor:
    """2^x for FP64 0 <= x < 1, in a fixed order, rounded once to FP32: correctly for every multiple of 2^-23."""
    t = (x - 0.5) * math.log(2.0)
    value = torch.ones_like(t)
    for k in range(15, 0, -1):  # Horner's rule for exp(t), |t| < 0.35: the next term is below 2^-60
        value = (value * t) / k + 1.0
    return (value * math.sqrt(2.0)).float()


@functools.cache
def _ulps(name: str, device: torch.device) -> Tensor:
    """(2^23,) int32."""
    raw = lzma.decompress((files("samebits.exact") / "special_sm_90.xz").read_bytes())
    at = TABLES.index(name) * FRACTIONS
    return torch.from_numpy(np.frombuffer(raw, np.int8, FRACTIONS, at).astype(np.int32)).to(device)
