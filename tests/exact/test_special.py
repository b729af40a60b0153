"""Elementary functions on a CPU: the values of an H200's unit, by digests of what it gave for whole binades of arguments."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from samebits.exact import special

OF_THE_UNIT = {
    ("ex2_approx", 1, 0): "cce5df10202dbfcd",
    ("ex2_approx", -1, 1): "272c2dbdfedc05f8",
    ("ex2_approx", -1, 0): "503d2238b9f4c00e",
    ("ex2_approx", -1, -1): "974254afd8954844",
    ("ex2_approx", -1, -4): "3b1fe6399985c9f1",
    ("rcp_approx", 1, 0): "c408381446132e07",
    ("rsqrt_approx", 1, 0): "c733e1437c713cd7",
    ("rsqrt_approx", 1, 1): "fd7b866f4085a9e8",
}
"""By function, sign and exponent of the 2^23 arguments: start of the SHA-256 of the bits that an H200 gave."""


def binade(sign: int, exponent: int) -> torch.Tensor:
    fractions = torch.arange(special.FRACTIONS, dtype=torch.int32)
    return (fractions | exponent + 127 << 23).view(torch.float32) * sign


@pytest.mark.parametrize(("name", "sign", "exponent"), OF_THE_UNIT)
def test_a_cpu_gives_what_the_unit_gave(name: str, sign: int, exponent: int) -> None:
    found = getattr(special, name)(binade(sign, exponent))
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == OF_THE_UNIT[name, sign, exponent]


def test_the_unit_does_not_round_correctly() -> None:
    x = binade(1, 0)
    for function, exact in (
        (special.ex2_approx, torch.exp2(x.double())),
        (special.rcp_approx, 1.0 / x.double()),
        (special.rsqrt_approx, 1.0 / x.double().sqrt()),
    ):
        ulps = function(x).view(torch.int32) - exact.float().view(torch.int32)
        assert 0.1 < (ulps != 0).float().mean() < 0.5
        assert ulps.abs().max() <= 2


def test_ex2_at_the_edges() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, 1e-40, -1.0, 127.0, 128.0, -126.0, -126.5, -inf, inf, nan])
    expected = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0**127, inf, 2.0**-126, 0.0, 0.0, inf, nan])
    assert torch.equal(special.ex2_approx(x).nan_to_num(nan=7.0, posinf=9.0), expected.nan_to_num(nan=7.0, posinf=9.0))


def test_ex2_of_what_is_cut_away_whole() -> None:
    """As a GPU showed: a negative argument above -2^-23 counts as zero, and the first below it does not."""
    x = torch.tensor([-(2.0**-126), -(2.0**-24), -(2.0**-23) * (1 - 2.0**-24), -(2.0**-23)])
    assert special.ex2_approx(x).view(torch.int32).tolist() == [0x3F800000, 0x3F800000, 0x3F800000, 0x3F7FFFFE]


def test_rcp_and_rsqrt_at_the_edges() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, inf, nan, 4.0, 2.0**-126, 1e-45, -1e-45])
    assert special.rcp_approx(x)[:6].nan_to_num(7.0, 9.0, -9.0).tolist() == [9.0, -9.0, 0.0, 7.0, 0.25, 2.0**126]
    expected = [9.0, -9.0, 0.0, 7.0, 0.5, 2.0**63, 9.0, -9.0]
    assert special.rsqrt_approx(x).nan_to_num(7.0, 9.0, -9.0).tolist() == expected
    assert special.rsqrt_approx(torch.tensor([-1.0, -inf])).isnan().all()


def test_log2_is_accurate_and_exact_at_powers_of_two() -> None:
    x = torch.exp(torch.linspace(-80, 80, 100_001))
    exact = torch.log2(x.double())
    assert ((special.log2_portable(x).double() - exact).abs() / exact.abs().clamp(min=1.0)).max() < 1.5e-7
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    assert special.log2_portable(powers).tolist() == list(range(-126, 128))
    assert special.log2_portable(torch.tensor([math.inf])).item() == math.inf
    assert special.log2_portable(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize(
    "function", [special.ex2_approx, special.rcp_approx, special.rsqrt_approx, special.log2_portable]
)
def test_only_fp32(function: object) -> None:
    with pytest.raises(TypeError, match=r"must be torch\.float32"):
        function(torch.ones(2, dtype=torch.float64))  # type: ignore[operator]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ex2_approx", "rcp_approx", "rsqrt_approx"])
def test_a_cpu_gives_the_bits_of_the_instruction(name: str) -> None:
    function = getattr(special, name)
    for sign in (1, -1):
        for exponent in (-126, -60, -30, -24, -23, -8, -2, -1, 0, 1, 2, 5, 6, 7, 60, 125):
            x = binade(sign, exponent)[:: 7 if exponent else 1]
            here, there = function(x), function(x.cuda()).cpu()
            same = (here.view(torch.int32) == there.view(torch.int32)) | (here.isnan() & there.isnan())
            assert same.all(), (sign, exponent, x[~same][:3].tolist())
