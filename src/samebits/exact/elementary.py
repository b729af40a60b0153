"""exp, sigmoid, rsqrt, sin and cos, FP32: the device's own, or on a CPU those of a GPU (:func:`bits_of`).

On CUDA tensors each is torch's function, which is the one of CUDA's library. That library rounds every step of exp, sin and cos
in a documented way but for one exponential of the special-function unit, which :mod:`samebits.exact.special` has as a
table; so a CPU can give the same bits. What the steps are was read from the PTX that NVRTC 13.0 writes, and every one of the
2^32 arguments was compared on an H200. A NaN is a NaN, with the sign and payload of whoever made it.

* exp(x) = 2^r 2^n, n = floor(252 clamp(x log2(e) / 252 + 1/2, 0, 1)) - 126, r = x log2(e) - n in two fused steps.
* rsqrt(x): the unit's; a subnormal x is scaled by 2^24 before and by 2^12 behind.
* sin, cos: x - q pi/2 in three fused steps below 105615, else from 192 bits of 2 / pi; then a polynomial of the quadrant.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.exact import special
from samebits.exact.fma import fma

ARCHITECTURES = ("sm_90",)
"""Whose special-function unit was read out."""
_chosen: str | None = None


@contextlib.contextmanager
def bits_of(architecture: str) -> Iterator[None]:
    """Within it, what samebits computes on CPU tensors has the bits of a GPU of ``architecture``: the GPU's bits on a laptop.

        with samebits.bits_of("sm_90"):
            y = samebits.rmsnorm(x, weight)  # CPU tensors; the bytes of an H200

    Tensor cores, orders of sums and the functions inside ``attention`` are modelled on a CPU in any case; this adds exp, rsqrt,
    sin and cos. It changes neither torch's own functions nor anything on CUDA tensors. A backward has to run within it too. It
    holds for the whole process, like ``samebits.policy``. ValueError: an architecture whose functions are not known; known is
    ``sm_90``.
    """
    global _chosen
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"the elementary functions of {architecture!r} are not known; known: {', '.join(ARCHITECTURES)}"
        )
    before, _chosen = _chosen, architecture
    try:
        yield
    finally:
        _chosen = before


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return exp_of_cuda(x) if modelled(x) else torch.exp(x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return rsqrt_of_cuda(x) if modelled(x) else torch.rsqrt(x)


def sin(x: Tensor) -> Tensor:
    return sin_of_cuda(x) if modelled(x) else torch.sin(x)


def cos(x: Tensor) -> Tensor:
    return cos_of_cuda(x) if modelled(x) else torch.cos(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), every operation rounded: torch.sigmoid on a GPU. On a CPU that one has another formula for the last
    elements of a dense tensor, so a row would depend on its neighbours."""
    one = torch.ones_like(x)
    return one / (one + exp(-x))


def chosen() -> str | None:
    """The architecture of the :func:`bits_of` that is in force."""
    return _chosen


def modelled(x: Tensor) -> bool:
    """Whether a GPU's functions stand in for this tensor's machine."""
    if x.dtype != torch.float32:
        raise TypeError(f"x must be torch.float32, not {x.dtype}")
    return _chosen is not None and not x.is_cuda


# --- CUDA's functions, on any device ----------------------------------------------------------------------------------

_LOG2_E, _LOG2_E_LOW = float.fromhex("0x1.715476p+0"), float.fromhex("0x1.4ae0c0p-26")
_LOG2_E_OVER_252 = float.fromhex("0x1.77313ap-8")
_HALF_PI = tuple(map(float.fromhex, ("0x1.921fb4p+0", "0x1.4442d0p-24", "0x1.84698ap-48")))
_TWO_OVER_PI = float.fromhex("0x1.45f306p-1")
_NEAR = 105615.0
"""Where three parts of pi/2 no longer do."""
_DIGITS = (0x3C439041, 0xDB629599, 0xF534DDC0, 0xFC2757D1, 0x4E441529, 0xA2F9836E)
"""2 / pi in 32-bit digits, the lowest first."""
_HALF_PI_64 = float.fromhex("0x1.921fb54442d19p-64")
_WORD = 0xFFFFFFFF
_SINE = tuple(map(float.fromhex, ("-0x1.9a82a6p-13", "0x1.110bc8p-7", "-0x1.555550p-3")))
_COSINE = tuple(map(float.fromhex, ("0x1.975800p-16", "-0x1.6c0fdap-10", "0x1.555576p-5", "-0x1.fffffep-2")))


def exp_of_cuda(x: Tensor) -> Tensor:
    """``expf``, x FP32 on any device."""
    place = fma(x, _like(x, _LOG2_E_OVER_252), _like(x, 0.5)).nan_to_num(0.0).clamp(0.0, 1.0)
    whole = (place.double() * 252).floor() - 126
    rest = fma(x, _like(x, _LOG2_E), -whole.float())
    rest = fma(x, _like(x, _LOG2_E_LOW), rest)
    return special.ex2_of_table(rest) * _power(whole)


def rsqrt_of_cuda(x: Tensor) -> Tensor:
    """``rsqrtf``, x FP32 on any device."""
    scaled = special.rsqrt_of_table(x * 2.0**24) * 2.0**12
    return torch.where(x.abs() < special.SMALLEST_NORMAL, scaled, special.rsqrt_of_table(x))


def sin_of_cuda(x: Tensor) -> Tensor:
    """``sinf``, x FP32 on any device."""
    return _of_quadrant(*_reduced(x))


def cos_of_cuda(x: Tensor) -> Tensor:
    """``cosf``, x FP32 on any device."""
    rest, quadrant = _reduced(x)
    return _of_quadrant(rest, quadrant + 1)


def _reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    """x less the nearest multiple of pi/2, FP32, and which it is, int64; only its last two bits count."""
    near = ~(x.abs() >= _NEAR)  # NaN is
    turns = torch.where(near, x, 0.0).mul(_TWO_OVER_PI).nan_to_num(0.0).round() + 0.0
    rest = torch.where(near, x, 0.0)
    for part in _HALF_PI:
        rest = fma(turns, _like(x, -part), rest)
    far, quadrant = _reduced_by_digits(x)
    far = torch.where(x.isinf(), math.nan, far)
    return torch.where(near, rest, far), torch.where(near, turns.long(), torch.where(x.isinf(), 0, quadrant))


def _reduced_by_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`_reduced` for finite |x| >= 2^15, in 32-bit words held by int64."""
    word = x.contiguous().view(torch.int32).long() & _WORD
    exponent = (word >> 23 & 255) - 128
    mantissa = (word << 8 & _WORD) | 1 << 31
    carry = torch.zeros_like(word)
    places = []
    for digit in _DIGITS:
        low, high = mantissa * (digit & 0xFFFF), mantissa * (digit >> 16)  # 48 bits each
        total = low + ((high & 0xFFFF) << 16) + carry
        places.append(total & _WORD)
        carry = (total >> 32) + (high >> 16)
    product = torch.stack((*places, carry))
    first, shift = (exponent >> 5).clamp(0, 3), exponent & 31

    def at(place: Tensor) -> Tensor:
        return product.gather(0, place[None])[0]

    top, middle, low = at(6 - first), at(5 - first), at(4 - first)
    top = (top << shift | middle >> 32 - shift) & _WORD
    middle = (middle << shift | low >> 32 - shift) & _WORD
    fraction, lower = (top << 2 | middle >> 30) & _WORD, middle << 2 & _WORD
    beyond = fraction >> 31  # past the middle: the next multiple is nearer
    quadrant = (top >> 30) + beyond
    flip = _WORD * beyond
    value = ((fraction ^ flip) << 32 | (lower ^ flip)).double() * _HALF_PI_64
    rest = value.float()
    negative = x < 0
    return torch.where(negative ^ (beyond == 1), -rest, rest), torch.where(negative, -quadrant, quadrant)


def _of_quadrant(rest: Tensor, quadrant: Tensor) -> Tensor:
    """sin(rest + quadrant pi/2)."""
    odd = quadrant & 1 == 1
    base = torch.where(odd, 1.0, rest)
    square = rest * rest
    value = torch.where(odd, fma(_like(rest, _COSINE[0]), square, _like(rest, _COSINE[1])), _SINE[0])
    for of_sine, of_cosine in zip(_SINE[1:], _COSINE[2:], strict=True):
        value = fma(value, square, torch.where(odd, of_cosine, _like(rest, of_sine)))
    value = fma(value, square * base + 0.0, base)
    return torch.where(quadrant & 2 == 2, 0.0 - value, value)


def _power(whole: Tensor) -> Tensor:
    """2^whole, FP32, -126 <= whole <= 127."""
    return (whole.int() + 127 << 23).view(torch.float32)


def _like(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, value)
