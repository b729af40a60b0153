"""FP16 operands of the tensor-core chain: the same unit, another exponent range. On a GPU against the unit itself."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from samebits.exact.bits import bits
from samebits.exact.compare import same_bits
from samebits.exact.tensor_core import chain

KINDS = ("normal", "wide", "cancelling", "subnormal operands", "zeros beside large factors")
SMALLEST_NORMAL = {torch.float16: -14, torch.float32: -126}


def draw(kind: str, seed: int, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, start)."""
    generator = torch.Generator().manual_seed(seed)
    a, b, start = (torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (m, n)))

    def scale(low: int, high: int, *shape: int) -> Tensor:
        return torch.exp2(torch.randint(low, high, shape, generator=generator).float())

    if kind == "wide":
        a, b, start = a * scale(-10, 10, m, k), b * scale(-10, 10, n, k), start * scale(-20, 20, m, n)
    elif kind == "cancelling":
        a[:, 1::2], b[:, 1::2] = -a[:, 0::2], b[:, 0::2] * (1 + scale(-9, -7, n, k // 2))
    elif kind == "subnormal operands":
        a, b, start = a * scale(-24, -12, m, k), b * scale(-6, 8, n, k), start * scale(-30, -10, m, n)
    elif kind == "zeros beside large factors":
        a[:, ::2], b[:, ::2], start = 0, b[:, ::2] * 2.0**12, start * 2.0**-20
    return a.half(), b.half(), start


def exponent(value: float, dtype: torch.dtype) -> int:
    return max(math.frexp(value)[1] - 1, SMALLEST_NORMAL[dtype])


def one_chain(a: Tensor, b: Tensor, acc: float) -> float:
    """In fractions, one group of 16 at a time."""
    for k in range(0, len(a), 16):
        pairs = list(zip(a[k : k + 16].tolist(), b[k : k + 16].tolist(), strict=True))
        terms = [(Fraction(x) * Fraction(y), exponent(x, a.dtype) + exponent(y, b.dtype)) for x, y in pairs]
        terms.append((Fraction(acc), exponent(acc, torch.float32)))
        top = max((e for value, e in terms if value), default=0)
        unit = Fraction(2) ** (top - 25)
        total = sum(math.trunc(value / unit) for value, _ in terms) * unit
        if total:
            size = max(math.floor(math.log2(abs(total))), -126)
            size += (abs(total) >= Fraction(2) ** (size + 1)) - (abs(total) < Fraction(2) ** size and size > -126)
            last = Fraction(2) ** (size - 23)
            total = (1 if total > 0 else -1) * (abs(total) // last) * last
        acc = float(total)
    return acc


@pytest.mark.parametrize("kind", KINDS)
def test_chain_spelled_out(kind: str) -> None:
    a, b, start = draw(kind, 1, 5, 4, 40)
    expected = [[one_chain(a[i], b[j], float(start[i, j])) for j in range(4)] for i in range(5)]
    assert same_bits(chain(a, b, start), torch.tensor(expected))


def test_the_exponent_of_a_subnormal_is_that_of_the_smallest_normal() -> None:
    """2^-24 times 2^-10 aligns as 2^-14 * 2^-10 = 2^-24, so 25 places below that end at 2^-49: the accumulator is cut there."""
    a, b = torch.full((1, 16), 0.0).half(), torch.full((1, 16), 2.0**-10).half()
    a[0, 0] = 2.0**-24
    start = torch.tensor([[2.0**-30 + 2.0**-50]])
    assert chain(a, b, start).item() == 2.0**-34 + 2.0**-30


def test_operands_of_two_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="they must agree"):
        chain(torch.ones(2, 16).half(), torch.ones(2, 16).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_unit_gives_these_bits(kind: str) -> None:
    from exact.tensor_core_probe import multiply  # type: ignore[import-not-found,unused-ignore]

    a, b, start = draw(kind, 7, 64, 64, 64)
    got = multiply(a.cuda(), b.cuda(), start.cuda()).cpu()
    assert torch.equal(bits(got), bits(chain(a, b, start)))
