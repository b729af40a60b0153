"""Our kernels against the oracle on the GPU: every case, every boundary, every row alone."""

from __future__ import annotations

import pytest
import torch

from samebits import accept as acceptance
from samebits.accept.cases import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("provider", ["cuda", "triton", "operators"])
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_every_boundary_has_the_bytes_of_the_oracle(provider: str, case: str) -> None:
    report = acceptance.accept(provider=provider, device="cuda", cases=[case])
    wrong = {(result.form, result.reason or result.divergence, result.varying) for result in report.cases}
    assert all(result.passed for result in report.cases), wrong
    assert [judged.lines for judged in report.golden if judged.status == "differs"] == []


def test_the_cuda_provider_runs_its_own_operators_in_both_forms() -> None:
    report = acceptance.accept(provider="cuda", device="cuda", cases=["fused_pre_norm"])
    assert [case.form for case in report.cases] == ["composed", "fused"]
    assert report.provenance["actual_backend"] == "cuda"
    assert set(report.capabilities["implemented_operators"]) == {
        *("hc_split_sinkhorn", "fp32_gemm_rms", "mhc_post", "h_aggregate", "rmsnorm_residual", "fixed_k_gemm"),
        *("mhc_pre", "mhc_pre_rmsnorm_fused"),
    }


def test_the_default_is_cuda_where_there_is_a_gpu() -> None:
    assert acceptance.accept(cases=["rms_edges"]).provider == "cuda"


@pytest.mark.multi_gpu
def test_on_the_second_gpu() -> None:
    report = acceptance.accept(provider="cuda", device="cuda:1", cases=["packed_t7_odd", "integer_fused"])
    assert report.passed and report.device == "cuda:1"
    assert torch.cuda.current_device() == 0
