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
