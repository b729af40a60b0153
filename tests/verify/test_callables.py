"""Checking what is not ours."""

from pathlib import Path

import pytest
import torch
from verify import faults

from samebits.verify import check
from samebits.verify.callables import KNOWN, canonical_name, resolve

FAULTS = Path(faults.__file__)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_functions_can_be_fed(name):
    sizes = dict.fromkeys(KNOWN[name].sizes, 8)
    report = check(name, device="cpu", rows=5, sizes=sizes, only=["accuracy", "repeat"])
    assert report.status()["forward_accuracy"] == "pass"
    assert report.status()["gradient_accuracy"] == "pass"


def test_matrix_multiplication_on_a_cpu_is_not_batch_invariant():
    """The README's example: accurate, repeatable, and not invariant."""
    report = check("torch.mm", device="cpu", rows=18, only=["accuracy", "repeat", "batch"])
    assert report.status()["forward_accuracy"] == "pass"
    assert report.status()["forward_invariance"] == "fail"
    assert report.exit_code == 1
    failed = report.check("forward_invariance").failures
    assert "repeat" not in {f.axis for f in failed}
    assert failed[0].label == "batch size 1 vs 18"
    assert failed[0].evidence["left_bits"] != failed[0].evidence["right_bits"]
    assert "order the candidate does not promise" in report.check("gradient_invariance").notes[0]


def test_an_honest_pass_of_a_foreign_function():
    report = check("torch.nn.functional.silu", device="cpu", rows=20, sizes={"D": 64})
    assert {s for n, s in report.status().items() if n != "reference_bits"} == {"pass"}
    assert "itself on FP64 inputs" in report.judged_against


def test_dtypes():
    report = check(torch.nn.functional.rms_norm, device="cpu", rows=9, sizes={"D": 64}, dtype=torch.bfloat16)
    assert report.options["dtype"] == "bfloat16"
    assert report.candidate == "torch.nn.functional.rms_norm"
    assert report.status()["forward_accuracy"] == "pass"


def test_shapes_of_an_unknown_function():
    report = check("torch.tanh", device="cpu", rows=9, shapes=["T,3,4"], only=["accuracy", "single"])
    assert report.passed
    assert report.check("forward_invariance").comparisons == 1


def test_a_file_that_brings_its_inputs():
    report = check(f"{FAULTS}:scaled_rows", device="cpu", rows=12)
    assert report.passed, report.checks
    # the gradient of the table sums over rows
    assert "gradient of table" in report.check("gradient_invariance").notes[0]


def test_a_callable_judged_by_an_operator_either_way_round():
    one = check("h_aggregate", against=f"{FAULTS}:skipped_tail", device="cpu", rows=5, sizes={"D": 24})
    two = check(f"{FAULTS}:skipped_tail", against="h_aggregate", device="cpu", rows=5, sizes={"D": 24})
    assert one.status() == two.status()
    assert one.status()["forward_accuracy"] == "fail"


def wrong_softmax(x):
    return torch.softmax(x, dim=-1) * 1.01


def right_softmax(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


def test_another_callable_as_judge():
    options = {"device": "cpu", "rows": 9, "shapes": ["T,33"]}
    assert check(right_softmax, **options, only=["accuracy"]).passed
    assert check(wrong_softmax, **options, only=["accuracy"]).passed  # judged by itself a wrong function looks right
    judged = check(wrong_softmax, against=right_softmax, **options, only=["accuracy"])
    assert judged.status()["forward_accuracy"] == judged.status()["gradient_accuracy"] == "fail"
    assert "right_softmax" in judged.judged_against


def test_no_fp64_is_said_and_is_no_pass():
    def only_fp32(x):
        if x.dtype != torch.float32:
            raise TypeError("FP32 only")
        return x * 2

    report = check(only_fp32, device="cpu", rows=5, shapes=["T,4"])
    assert report.status()["forward_accuracy"] == "not run"
    assert "TypeError: FP32 only" in report.check("forward_accuracy").summary
    assert report.status()["forward_invariance"] == "pass"
    assert report.exit_code == 1


def test_resolving():
    assert resolve("torch.nn.functional.rms_norm")[0] is torch.nn.functional.rms_norm
    assert resolve("torch:mm")[0] is torch.mm
    assert resolve("torch.Tensor.exp")[0] is torch.Tensor.exp
    assert canonical_name(torch.mm) == "torch.mm"
    assert canonical_name(torch.exp) is None
