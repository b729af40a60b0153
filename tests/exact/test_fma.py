"""The fused multiply-add (one rounding), against exact fractions rounded by integers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from samebits.exact.bits import bits, canonical_nan
from samebits.exact.fma import fma


def rounded(value: Fraction) -> float:
    """To FP32, nearest, ties to even, subnormals included. An exact zero is the caller's business: it has a sign."""
    magnitude = abs(value)
    exponent = -126
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    whole, rest = divmod(magnitude, unit)
    if rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1):
        whole += 1
    number = whole * unit
    if number >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(number), value)


def slow(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return float(np.float64(a) * np.float64(b) + np.float64(c))  # no finite value is near enough to overflow
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if a * b == 0 else 0.0  # FP64 has the sign rules of zero
    return rounded(exact)


def check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    with np.errstate(invalid="ignore"):
        expected = torch.tensor([slow(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])
    got = fma(a, b, c)
    wrong = bits(canonical_nan(got)) != bits(canonical_nan(expected.float()))
    assert not wrong.any(), list(zip(*(t[wrong].tolist()[:3] for t in (a, b, c, got, expected)), strict=True))


def words(count: int, seed: int) -> torch.Tensor:
    """Uniform over all bit patterns."""
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (count,), generator=draw, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )


def test_any_three_words():
    check(words(4000, 1), words(4000, 2), words(4000, 3))


def test_numbers_that_meet():
    """The addend is near the product, so that the sum cancels, is a tie or loses a few bits."""
    draw = torch.Generator().manual_seed(4)
    a, b = torch.randn(3000, generator=draw), torch.randn(3000, generator=draw)
    shift = torch.exp2(torch.randint(-30, 31, (3000,), generator=draw).float())
    check(a, b, -(a * b) * shift)
    check(a, b, -(a * b))


def test_ties_and_their_neighbours():
    """The product is 2^-24 (1 - 2^-30): in FP64 the sum is a tie of FP32, and only what it lost says to which side to go."""
    a = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 2.0**-24 * (1 + 2.0**-15)
    b = torch.full((4,), 1 - 2.0**-15)
    c = torch.tensor([1 + 2.0**-23, 1 + 2.0**-23, 1.0, 1 + 2.0**-22])
    check(a, b, c)
    assert not torch.equal((a.double() * b.double() + c.double()).float(), fma(a, b, c)), "rounding twice must show"
    exact = torch.full((4,), 2.0**-24)
    check(exact, torch.ones(4), c)
    check(torch.tensor([2.0**-80, -(2.0**-80)]), torch.tensor([2.0**-80, 2.0**-20]), torch.tensor([1.0, -1.0]))


def test_subnormal_results():
    draw = torch.Generator().manual_seed(5)
    a = torch.randn(3000, generator=draw) * 2.0**-70
    b = torch.randn(3000, generator=draw) * torch.exp2(torch.randint(-80, -50, (3000,), generator=draw).float())
    c = torch.randint(-64, 65, (3000,), generator=draw).float() * 2.0**-149
    check(a, b, c)
    half = torch.tensor([2.0**-75, 2.0**-75, 2.0**-75 * 3])
    check(half, torch.tensor([1.0, -1.0, 1.0]) * 2.0**-75, torch.tensor([2.0**-149, 2.0**-149, 0.0]))


@pytest.mark.parametrize("c", [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38])
def test_zeros_infinities_and_overflow(c):
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45]
    pairs = [(a, b) for a in values for b in values]
    check(torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs]), torch.full((len(pairs),), c))


def test_shapes_broadcast():
    assert fma(torch.ones(2, 1), torch.ones(3), torch.zeros(4, 1, 1)).shape == (4, 2, 3)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits():
    a, b, c = words(1 << 20, 6), words(1 << 20, 7), words(1 << 20, 8)
    here, there = fma(a, b, c), fma(a.cuda(), b.cuda(), c.cuda()).cpu()
    assert torch.equal(bits(canonical_nan(here)), bits(canonical_nan(there)))
