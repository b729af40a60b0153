"""The tensor-core chain (kchain), against the same definition in Python fractions; on a GPU against the unit itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from samebits import registry
from samebits.exact import tensor_core
from samebits.exact.bits import bits
from samebits.exact.compare import same_bits
from samebits.exact.tensor_core import chain
from samebits.ops.fp32_gemm_rms import fast
from samebits.verify.operators import draw as draw_input


@dataclass(frozen=True)
class Model:
    """The unit, one number at a time. Its other settings are what one could believe instead."""

    group: int = 16
    fraction: int = 25
    nearest: bool = False
    """Sums round to nearest even instead of toward zero."""
    lowest: int | None = None
    deepest: int = -133
    """No alignment below it."""
    zeros_align: bool = False
    """A product of zero and a large number takes part in the alignment, with the exponent -126 for the zero."""
    true_exponents: bool = False
    """A subnormal factor has the exponent of its leading bit."""
    flush: str = ""
    """What counts as zero where it is subnormal: ``operands``, ``results``."""

    def exponent(self, value: float) -> int:
        if value == 0:
            return -126
        exact = math.frexp(value)[1] - 1
        return exact if self.true_exponents else max(exact, -126)

    def step(self, a: list[float], b: list[float], acc: float) -> float:
        if "operands" in self.flush:
            a, b = ([0.0 if abs(v) < 2.0**-126 else v for v in operand] for operand in (a, b))
        terms = [(Fraction(x) * Fraction(y), self.exponent(x) + self.exponent(y)) for x, y in zip(a, b, strict=True)]
        chosen = [e for value, e in terms if value != 0 or self.zeros_align]
        terms.append((Fraction(acc), self.exponent(acc)))
        if acc != 0 or self.lowest is not None:
            chosen.append(terms[-1][1])
        unit = Fraction(2) ** (max(max(chosen, default=-126), self.deepest) - self.fraction)
        total = sum(math.trunc(value / unit) for value, _ in terms) * unit
        return self.rounded(total)

    def rounded(self, value: Fraction) -> float:
        if value == 0:
            return 0.0
        exponent = -126
        while abs(value) >= Fraction(2) ** (exponent + 1):
            exponent += 1
        unit = Fraction(2) ** (exponent - 23)
        whole = (round(abs(value) / unit) if self.nearest else abs(value) // unit) * unit
        if "results" in self.flush and whole < Fraction(2) ** -126:
            whole = Fraction(0)
        return math.copysign(math.inf if whole >= Fraction(2) ** 128 else float(whole), value)

    def chain(self, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """As the function of that name, of matrices."""
        out = start.tolist()
        for m, row in enumerate(a.double().tolist()):
            for n, column in enumerate(b.double().tolist()):
                for k in range(0, len(row), self.group):
                    if not math.isfinite(out[m][n]):
                        break
                    out[m][n] = self.step(row[k : k + self.group], column[k : k + self.group], out[m][n])
        return torch.tensor(out, dtype=torch.float32)


def draw(kind: str, seed: int, m: int = 8, n: int = 8, k: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, start)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def scale(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(low, high, shape, generator=generator).double())

    a, b, start = normal(m, k).double(), normal(n, k).double(), normal(m, n).double()
    if kind == "wide":
        a, b, start = a * scale(-12, 12, m, k), b * scale(-12, 12, n, k), start * scale(-20, 20, m, n)
    elif kind == "very wide":
        a, b, start = a * scale(-60, 60, m, k), b * scale(-60, 60, n, k), start * scale(-100, 100, m, n)
    elif kind == "cancelling":  # pairs that cancel but for a small rest
        a[:, 1::2], b[:, 1::2] = -a[:, 0::2], b[:, 0::2] * (1 + scale(-9, -7, n, k // 2))
    elif kind == "cancelling to zero":
        a[:, 1::2], b[:, 1::2], start = -a[:, 0::2], b[:, 0::2], start * 0
    elif kind == "zeros beside large factors":
        a = a * (torch.rand(m, k, generator=generator) < 0.3)
        b = torch.where(a.any(0) & (torch.rand(n, k, generator=generator) < 0.5), b, b * scale(60, 100, n, k))
        a = torch.where(b.abs().amax(0) > 2.0**40, 0.0, a)
        start = start * 2.0**-40
    elif kind == "subnormal operands":
        a, start = a * scale(-136, -122, m, k), start * scale(-140, -120, m, n)
        b = b * scale(-8, 20, n, k)
    elif kind == "subnormal products":  # far below the smallest normal number, and their sums around it
        a, b = a * scale(-76, -60, m, k), b * scale(-76, -60, n, k)
        start = start * scale(-149, -120, m, n)
    elif kind == "subnormal products from zero":
        a, b, start = a * scale(-76, -66, m, k), b * scale(-76, -66, n, k), start * 0
    elif (
        kind == "deep subnormal products"
    ):  # 2^-149 - 2^-157, and 2^-157 in two or four parts, which a bound keeps or not
        a, b, start = a * 0, torch.ones_like(b) * 2.0**-75, start * 0
        a[:, 0], a[0::2, 1:5], a[1::2, 1:3] = 255 * 2.0**-82, 2.0**-84, 2.0**-83
    elif kind == "sums below the least number":  # of either sign
        a, b, start = a * 0, torch.ones_like(b) * 2.0**-75, start * 0
        a[0::2, 0], a[1::2, 0] = 2.0**-77, -(2.0**-77)
    elif kind == "products beyond FP32 that cancel":
        a[:, 0::16], b[:, 0::16] = 2.0**100, 2.0**40
        a[:, 1::16], b[:, 1::16] = -(2.0**100), 2.0**40
        start = start * 2.0**110
    elif kind == "overflow":
        a, b = a * scale(60, 66, m, k), b.abs() * scale(56, 62, n, k)
    else:
        assert kind == "normal"
    return a.bfloat16(), b.bfloat16(), start.float()


KINDS = (
    "normal",
    "wide",
    "very wide",
    "cancelling",
    "cancelling to zero",
    "zeros beside large factors",
    "subnormal operands",
    "subnormal products",
    "subnormal products from zero",
    "deep subnormal products",
    "sums below the least number",
    "products beyond FP32 that cancel",
    "overflow",
)


def agree(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Element by element: the same bits, or both not finite."""
    return (bits(left) == bits(right)) | (~left.isfinite() & ~right.isfinite())


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_it_says(kind):
    a, b, start = draw(kind, seed=1)
    assert agree(chain(a, b, start), Model().chain(a, b, start)).all()


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (Model(group=8), "normal"),
        (Model(fraction=24), "normal"),
        (Model(fraction=26), "normal"),
        (Model(nearest=True), "normal"),
        (Model(lowest=-126), "subnormal products from zero"),
        (Model(deepest=-134), "deep subnormal products"),
        (Model(deepest=-132), "deep subnormal products"),
        (Model(zeros_align=True), "zeros beside large factors"),
        (Model(true_exponents=True), "subnormal operands"),
        (Model(flush="operands"), "subnormal operands"),
        (Model(flush="results"), "subnormal products"),
    ],
)
def test_another_unit_would_be_noticed(other, kind):
    a, b, start = draw(kind, seed=2)
    assert not agree(chain(a, b, start), other.chain(a, b, start)).all()


def test_the_data_reach_the_edges_they_are_named_for():
    def result(kind):
        return chain(*draw(kind, seed=1))

    smallest = 2.0**-126
    assert result("overflow").isinf().any() and result("overflow").isfinite().any()
    assert result("products beyond FP32 that cancel").isfinite().all()
    for kind in ("subnormal products", "subnormal products from zero"):
        size = result(kind).abs()
        assert ((size > 0) & (size < smallest)).any()
    size = draw("subnormal operands", seed=1)[0].abs()
    assert ((size > 0) & (size < smallest)).any() and (size >= smallest).any()
    assert (result("cancelling to zero") == 0).all()
    a, b, _ = draw("zeros beside large factors", seed=1)
    assert ((a[:, None] == 0) & (b[None].abs() > 2.0**40)).any()


def test_a_chain_continues():
    a, b, start = draw("wide", seed=3, k=160)
    whole = chain(a, b, start)
    assert same_bits(whole, chain(a[:, 48:], b[:, 48:], chain(a[:, :48], b[:, :48], start)))
    assert not same_bits(whole, chain(a[:, 40:], b[:, 40:], chain(a[:, :40], b[:, :40], start))), "groups are of 16"


def test_inside_a_group_the_order_is_free():
    a, b, start = draw("very wide", seed=4, k=16)
    turned = torch.randperm(16, generator=torch.Generator().manual_seed(4))
    assert same_bits(chain(a, b, start), chain(a[:, turned], b[:, turned], start))


def test_leading_axes_padding_and_blocks(monkeypatch):
    a, b, start = draw("wide", seed=5, m=12, n=6, k=40)
    batch = chain(torch.stack([a, a.flip(0)]), torch.stack([b, b]), torch.stack([start, start]))
    assert same_bits(batch[0], chain(a, b, start)) and batch.shape == (2, 12, 6)
    padded = [torch.nn.functional.pad(operand, (0, 24)) for operand in (a, b)]
    assert same_bits(chain(*padded, start), chain(a, b, start))
    monkeypatch.setitem(tensor_core._HELD, "cpu", 20)
    assert same_bits(chain(a, b, start), batch[0])


def test_nothing_to_add_gives_the_start():
    start = torch.randn(3, 2)
    assert same_bits(chain(torch.zeros(3, 0).bfloat16(), torch.zeros(2, 0).bfloat16(), start), start)
    assert same_bits(chain(torch.zeros(3, 5).bfloat16(), torch.ones(2, 5).bfloat16()), torch.zeros(3, 2))
    assert chain(torch.zeros(0, 5).bfloat16(), torch.ones(2, 5).bfloat16()).shape == (0, 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_row(bad):
    a, b, start = draw("normal", seed=6)
    clean = chain(a, b, start)
    a[3, 17] = bad
    got = chain(a, b, start)
    assert not got[3].isfinite().any()
    rest = torch.arange(8) != 3
    assert same_bits(got[rest], clean[rest])


def test_wrong_operands_are_refused():
    with pytest.raises(TypeError, match="a must be bfloat16"):
        chain(torch.ones(2, 16), torch.ones(2, 16).bfloat16())
    with pytest.raises(ValueError, match="agree"):
        chain(torch.ones(2, 16).bfloat16(), torch.ones(2, 32).bfloat16())


# --- the unit itself ---------------------------------------------------------------------------------------------------

BELIEFS = {
    "zero products take part in the alignment": Model(zeros_align=True),
    "no alignment below -126": Model(lowest=-126),
    "alignment however deep": Model(deepest=-1000),
    "subnormal factors have their true exponent": Model(true_exponents=True),
    "subnormal factors are zero": Model(flush="operands"),
    "subnormal results are zero": Model(flush="results"),
    "subnormal factors and results are zero": Model(flush="operands results"),
}
"""What to look at first where the unit does otherwise at an edge."""


def on_the_unit(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    from exact.tensor_core_probe import multiply

    return multiply(a.cuda(), b.cuda(), start.cuda()).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_unit_gives_these_bits(kind):
    a, b, start = draw(kind, seed=7, m=64, n=64, k=64)
    got, expected = on_the_unit(a, b, start), chain(a, b, start)
    same = agree(got, expected)
    if same.all():
        return
    few = (a[:8], b[:8], start[:8, :8])
    beliefs = {text: f"{agree(got[:8, :8], model.chain(*few)).float().mean():.3f}" for text, model in BELIEFS.items()}
    m, n = (~same).nonzero()[0].tolist()
    signs = int((~same & (got == expected)).sum())
    raise AssertionError(
        f"{int((~same).sum())} of {same.numel()} differ, {signs} of them only in the sign of a zero; first ({m}, {n}): unit "
        f"{got[m, n]:.9g}, model {expected[m, n]:.9g}; share of the first 64 that other beliefs explain: {beliefs}, "
        f"ours {same[:8, :8].float().mean():.3f}"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_the_same_model(kind):
    a, b, start = draw(kind, seed=8, m=32, n=16, k=272)
    assert agree(chain(a.cuda(), b.cuda(), start.cuda()).cpu(), chain(a, b, start)).all()


@pytest.mark.parametrize(("operator", "output", "seen"), [("mhc_pre", 8, 0x124B), ("mhc_pre_norm", 3, 0x80001E25)])
def test_sums_of_subnormal_products_as_an_h200_gave_them(operator: str, output: int, seen: int) -> None:
    """The two bits that showed that a zero accumulator takes no part in the alignment: a unit with one that does gives
    0x124c and 0x80001e24."""
    spec = registry.spec(operator)
    sizes = spec.complete({"D": 1})
    x, weight = (
        draw_input(spec, spec.forward.input(n), [0], sizes, 0, pattern="subnormal") for n in ("residual", "weight")
    )
    proj = fast.project(x.flatten(1), weight)
    assert proj[0, output].view(torch.int32).item() & 0xFFFFFFFF == seen
