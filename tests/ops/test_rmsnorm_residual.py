"""``rmsnorm_residual``: everything an operator must do, and the published bits."""

import hashlib

import pytest
import torch

from samebits import rmsnorm_residual, rmsnorm_residual_backward
from samebits.exact.bits import digest
from samebits.verify.conformance import Conformance


class TestRmsnormResidual(Conformance):
    op = "rmsnorm_residual"


def _generator(case: str) -> torch.Generator:
    word = int.from_bytes(hashlib.sha256(case.encode()).digest()[:4], "little")
    return torch.Generator().manual_seed(2026 + word)


def test_published_digests_of_the_edge_rows() -> None:
    """Case ``rms_edges`` of the public manifest (profile oracle-fp32-mhc-v1).

    Its FP32 inputs come from torch.randn and its grad_x from torch.rsqrt, whose bits depend on the vector unit: the
    manifest was made with AVX2 or later.
    """
    rows = [torch.zeros(128), torch.full((128,), 2.0**-12), torch.full((128,), 4.0), torch.linspace(-8, 8, 128)]
    x = torch.stack(rows).bfloat16()
    gamma = 1 + torch.randn(128, generator=_generator("rms_edges.gamma")) * 0.05
    upstream = _generator("rms_edges.grad")
    grad_y = torch.randn(4, 128, generator=upstream).bfloat16()
    grad_residual = (torch.randn(4, 128, generator=upstream) * 0.25).bfloat16()

    y, residual = rmsnorm_residual(x, gamma)
    rstd = torch.ops.samebits.rmsnorm_residual(x, gamma, 1e-6, "ascending", None)[2]
    grad_x, grad_gamma = rmsnorm_residual_backward(grad_y, grad_residual, x, gamma, rstd)
    assert grad_x is not None and grad_gamma is not None
    assert [digest(t)[:8] for t in (y, residual, grad_gamma)] == ["1d69ddad", "295b8bde", "3555e915"]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert digest(grad_x)[:8] == "19c6314c"


@pytest.mark.parametrize("contract", ["ascending", "tree512"])
def test_edge_rows(contract: str) -> None:
    gamma = torch.full((16,), 2.0)
    x = torch.stack([torch.zeros(16), torch.full((16,), -0.0), torch.full((16,), 3e38)]).bfloat16()
    y, residual = rmsnorm_residual(x, gamma, contract=contract)
    assert not y[0].any() and not y[0].signbit().any()
    assert not y[1].any() and y[1].signbit().all()
    assert not y[2].any()  # the sum of squares overflows: rstd = 0, as torch does
    assert digest(residual) == digest(x)


@pytest.mark.parametrize("contract", ["ascending", "tree512"])
def test_a_sum_of_squares_beyond_fp32_gives_zeros_as_torch_does(contract: str) -> None:
    """E2: defined, the same on every backend (the conformance pattern "huge"), and what torch gives."""
    gamma = torch.full((64,), 2.0)
    x = torch.full((2, 64), 1e20).bfloat16()
    x[1] = 1.0
    y, _ = rmsnorm_residual(x, gamma, contract=contract)
    expected = torch.nn.functional.rms_norm(x.float(), (64,), gamma, 1e-6).bfloat16()
    assert not y[0].any() and not expected[0].any()
    assert digest(y[1]) == digest(expected[1])


@pytest.mark.parametrize("contract", ["ascending", "tree512"])
def test_large_squares_are_no_overflow(contract: str) -> None:
    """E1: 300 squared is beyond FP16; the row is widened before it is squared. (FP16 rows themselves are refused.)"""
    y, _ = rmsnorm_residual(torch.full((1, 4096), 300.0).bfloat16(), torch.full((4096,), 3.0), contract=contract)
    assert (y == 3).all()


def test_y_is_rounded_once() -> None:
    """E20: gamma is FP32 and never rounded, and x * rstd is not rounded to BF16 before it meets gamma."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, 96, generator=generator).bfloat16()
    gamma = 1 + torch.randn(96, generator=generator)
    y, _ = rmsnorm_residual(x, gamma)
    rstd = torch.ops.samebits.rmsnorm_residual(x, gamma, 1e-6, "ascending", None)[2][:, None]
    normalised = (x.double() * rstd.double()).float()
    once = (normalised.double() * gamma.double()).float().bfloat16()
    assert digest(y) == digest(once)
    for twice in (normalised.bfloat16().float() * gamma, normalised * gamma.bfloat16().float()):
        assert (twice.bfloat16() != once).float().mean() > 0.1  # so the difference would have been seen


def test_a_single_row_of_zeros() -> None:
    """B8: one dimension, no batch axis, and a gradient of the weight that is zeros, not leftovers."""
    x, gamma = torch.zeros(4).bfloat16().requires_grad_(), torch.full((4,), 2.0, requires_grad=True)
    y, residual = rmsnorm_residual(x, gamma)
    (-(y.float().sum() + residual.float().sum())).backward()
    assert y.shape == (4,) and gamma.grad is not None and x.grad is not None
    assert digest(gamma.grad) == digest(torch.zeros(4)) and x.grad.isfinite().all()
