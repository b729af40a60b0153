"""Every planted fault makes acceptance fail, in the place where it is, and for nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from accept import planted

from samebits import accept as acceptance
from samebits.accept.cases import CASES
from samebits.accept.examine import CaseResult
from samebits.accept.provider import METHODS


def examine(provider: Any, case: str) -> CaseResult:
    report = acceptance.accept(provider=provider, device="cpu", cases=[case])
    assert report.exit_code == (0 if report.passed else 1)
    return report.cases[0]


def verdicts(result: CaseResult) -> dict[str, str]:
    return {boundary.name: boundary.verdict for boundary in result.boundaries if boundary.verdict != "same"}


@pytest.mark.parametrize("case", ["one_row", "mixer_frozen", "integer_zero_rows", "sinkhorn_edges", "fixed_k_gemm"])
def test_without_a_fault_it_passes(case: str) -> None:
    result = examine(planted.Right(), case)
    assert result.passed and result.same == len(result.boundaries) > 0
    assert result.compositions == result.rows + (case == "integer_zero_rows")


def test_one_bit_of_one_boundary() -> None:
    result = examine(planted.OneBit(), "packed_t7_odd")
    assert not result.passed and verdicts(result) == {"post.r_new": "differs", "r_new": "differs"}
    assert (
        result.divergence.startswith("post.r_new: row 6, column 2, 5: 0x") and "1 of 3584 elements" in result.divergence
    )
    assert result.divergence.endswith("(and 1 more)")


def test_one_bit_of_a_parameter_gradient() -> None:
    result = examine(planted.OneBitOfAParameterGradient(), "integer_one_row")
    assert verdicts(result) == {"bwd.d_gamma": "differs", "grad.d_gamma": "differs"} and not result.passed


def test_a_boundary_too_few() -> None:
    result = examine(planted.Omits(), "integer_one_row")
    assert not result.passed and verdicts(result) == {"grad.d_bias": "missing"}
    assert result.divergence == "grad.d_bias: the provider has no such boundary"


def test_a_boundary_too_many() -> None:
    result = examine(planted.Adds(), "mixer_frozen")
    assert not result.passed and verdicts(result) == {"grad.d_bias": "extra"}
    assert result.divergence == "grad.d_bias: the oracle has no such boundary"
    assert examine(planted.Adds(), "one_row").passed


def test_a_forward_that_depends_on_the_number_of_rows() -> None:
    result = examine(planted.ForwardDependsOnT(), "packed_t7_odd")
    assert not result.passed and verdicts(result) == {} and result.divergence == ""
    first = {entry.boundary: entry for entry in result.varying}["controller.p"]
    assert first.company == "row 0 alone" and first.also == 6 and "column 3" in first.what


def test_a_backward_that_depends_on_the_other_rows() -> None:
    result = examine(planted.BackwardDependsOnOthers(), "packed_t7_odd")
    assert not result.passed and verdicts(result) == {}
    varying = {entry.boundary for entry in result.varying}
    assert {"bwd.d_c", "grad.d_c"} <= varying and not any(
        name.startswith(("split", "post", "r_new")) for name in varying
    )


def test_a_zero_of_the_other_sign_in_a_row_alone() -> None:
    """Equal as numbers, so a comparison of values would have let it pass."""
    result = examine(planted.SignOfZero(), "integer_zero_rows")
    assert not result.passed and verdicts(result) == {}
    assert {entry.boundary for entry in result.varying} == {
        *("bwd.d_r_old", "grad.d_r_old"),
        *(f"bwd.d_stream{index}" for index in range(4)),
    }
    assert "0x80000000 (-0)" in result.varying[0].what and "at most 0 ulp apart" in result.varying[0].what


def test_a_zero_of_the_other_sign_in_the_batch() -> None:
    result = examine(planted.NegativeZeros(), "integer_zero_rows")
    assert not result.passed and result.divergence.startswith("pre.hidden: row 3")
    assert "0x8000 (-0)" in result.divergence


def test_the_published_formula_for_a_zero_row() -> None:
    """Its NaN would reach the gradients of every layer below."""
    result = examine(planted.FormulaAsPublished(), "integer_zero_rows")
    assert (
        not result.passed and result.reason.startswith("zero rows made bwd.d_r_old") and "not finite" in result.reason
    )
    assert examine(planted.FormulaAsPublished(), "integer_one_row").passed


def test_a_parameter_gradient_that_padding_changes() -> None:
    """Right for the nine rows of the case; the check without its zero rows sees it."""
    result = examine(planted.CountsPadding(), "integer_zero_rows")
    assert not result.passed and verdicts(result) == {}
    assert {entry.boundary for entry in result.varying} == {"bwd.d_gamma", "grad.d_gamma"}
    assert result.varying[0].company == "without the zero rows 3, 8"


@pytest.mark.parametrize(
    ("provider", "case", "reason"),
    [
        (planted.NoCopy, "integer_one_row", "norm.residual shares the memory of its original"),
        (planted.NoCopy, "rms_edges", "rms.residual shares the memory of its original"),
        (planted.ChangesItsInput, "integer_one_row", "changes-its-input changed its inputs"),
        (planted.NothingWhereATensorBelongs, "integer_one_row", "raised TypeError"),
        (planted.Crashes, "integer_one_row", "crashes raised RuntimeError: an illegal memory access"),
        (planted.OtherProfile, "integer_one_row", "numeric profile 'mhc-tree256'"),
        (planted.NoFrozenMixer, "mixer_frozen", "does not declare trainability 'mixer-frozen', only full"),
        (planted.OnlyPacked, "integer_one_row", "does not declare geometry 'one-row', only packed"),
        (planted.Partial, "integer_one_row", "partial has no mhc_pre_fwd"),
        (planted.Partial, "sinkhorn_edges", "partial has no hc_split_sinkhorn_bwd"),
    ],
)
def test_a_case_that_cannot_end_fails_and_says_why(provider: type, case: str, reason: str) -> None:
    result = examine(provider(), case)
    assert not result.passed and reason in result.reason


def test_the_same_bytes_in_another_shape_or_dtype() -> None:
    result = examine(planted.OtherShape(), "integer_one_row")
    assert not result.passed and "post.r_new: bfloat16 (1, 4, 128) against bfloat16 (1, 512)" in result.divergence
    result = examine(planted.OtherDtype(), "rms_edges")
    assert not result.passed and "rms.y: bfloat16 (4, 128) against float32 (4, 128)" in result.divergence


def test_memory_that_is_used_again_is_no_fault() -> None:
    assert examine(planted.UsesItsMemoryAgain(), "packed_t7_odd").passed


def test_every_form_is_held_to_the_bytes() -> None:
    report = acceptance.accept(provider=planted.SecondFormIsWrong(), device="cpu", cases=["one_row", "rms_edges"])
    found = {(case.name, case.form): case.passed for case in report.cases}
    assert found == {("one_row", "composed"): True, ("one_row", "fused"): False, ("rms_edges", "composed"): True}
    assert not report.passed


def test_a_stub_fails_every_case_with_a_reason() -> None:
    report = acceptance.accept(provider="stub", device="cpu")
    assert report.exit_code == 1 and [case.name for case in report.cases] == [case.name for case in CASES]
    for case in report.cases:
        assert not case.passed and not case.boundaries
        assert case.reason.startswith("stub has no ")


def test_a_stub_raises_in_every_method() -> None:
    stub: Any = acceptance.StubProvider()
    operators = [name for name in METHODS if name not in ("capabilities", "provenance")]
    assert len(operators) == 15
    for name in operators:
        with pytest.raises(NotImplementedError, match=name):
            getattr(stub, name)()


def test_nothing_run_is_nothing_passed() -> None:
    """A report without a case, or a case without a boundary, has not passed."""
    report = acceptance.accept(provider=planted.Right(), device="cpu", cases=["one_row"])
    assert report.passed
    assert not dataclasses.replace(report, cases=()).passed
    empty = dataclasses.replace(report.cases[0], boundaries=())
    assert not empty.passed and not dataclasses.replace(report, cases=(empty,)).passed
