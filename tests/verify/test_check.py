import json

import pytest
import torch
from verify import faults

from samebits.verify import UsageError, check

CHECKS = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance", "reference_bits")


def look(op, candidate, contract=None, width=40, **options):
    return check(op, against=candidate, contract=contract, device="cpu", rows=20, sizes={"D": width}, **options)


def failing(report):
    return {c.name for c in report.checks if c.status != "pass" and c.status != "n/a"}


def axes(report, name):
    return {failure.axis for failure in report.check(name).failures}


@pytest.mark.parametrize(("op", "candidate"), [("h_aggregate", "right"), ("rmsnorm_residual", "right_norm")])
def test_a_right_candidate_passes_every_check(op, candidate):
    report = look(op, getattr(faults, candidate), contract="ascending")
    assert report.status() == dict.fromkeys(CHECKS, "pass")
    assert report.passed and report.exit_code == 0
    assert all(c.comparisons for c in report.checks)


@pytest.mark.parametrize(
    ("op", "candidate", "expected"),
    [
        ("h_aggregate", "skipped_tail", {"forward_accuracy"}),
        ("h_aggregate", "skipped_tail_of_gradient", {"gradient_accuracy"}),
        ("h_aggregate", "doubled_gradient", {"gradient_accuracy"}),
        ("rmsnorm_residual", "missing_gamma", {"forward_accuracy"}),
        ("h_aggregate", "batch_dependent_split", {"gradient_invariance"}),
        ("h_aggregate", "batch_dependent_rounding", {"forward_invariance"}),
        ("h_aggregate", "position_dependent", {"forward_invariance"}),
        ("h_aggregate", "leaking", {"forward_invariance"}),
        ("h_aggregate", "random_bits", {"forward_invariance"}),
        ("h_aggregate", "descending", set()),
        ("rmsnorm_residual", "fused_multiply_add", set()),
        ("rmsnorm_residual", "other_order_over_rows", set()),
    ],
)
def test_a_planted_fault_fails_exactly_its_check(op, candidate, expected):
    report = look(op, getattr(faults, candidate))
    assert failing(report) == expected, report.checks
    assert report.check("reference_bits").status == "n/a"


@pytest.mark.parametrize(
    ("op", "candidate", "also"),
    [
        ("h_aggregate", "descending", set()),
        ("rmsnorm_residual", "fused_multiply_add", {"gradient_invariance"}),  # no fold of its own single rows any more
        ("rmsnorm_residual", "other_order_over_rows", {"gradient_invariance"}),
    ],
)
def test_wrong_bits_fail_whoever_claims_the_contract(op, candidate, also):
    report = look(op, getattr(faults, candidate), contract="ascending")
    assert failing(report) == {"reference_bits"} | also, report.checks
    if also:
        assert axes(report, "gradient_invariance") == {"fold"}


def test_the_broken_axis_is_named():
    split = look("h_aggregate", faults.batch_dependent_split, width=300).check("gradient_invariance")
    assert {f.axis for f in split.failures} == {"batch", "chunk", "single"}
    first = next(f for f in split.failures if f.axis == "batch")
    assert (first.label, first.result) == ("batch size 1 vs 20", "pre")
    assert first.evidence["left_bits"].startswith("0x") and first.evidence["left_bits"] != first.evidence["right_bits"]
    assert first.evidence["row"] == 0 and 0 < first.evidence["count"] <= 4 and len(first.evidence["column"]) == 1
    assert first.also == 6  # batch sizes 2, 3, 7, 8, 15 and 16
    assert "batch (batch size 1 vs 20)" in split.summary

    assert "repeat" in axes(look("h_aggregate", faults.random_bits), "forward_invariance")
    assert axes(look("h_aggregate", faults.leaking), "forward_invariance") == {"batch", "position", "padding"}
    moved = axes(look("h_aggregate", faults.position_dependent), "forward_invariance")
    assert moved == {"position", "padding", "chunk", "permutation", "single"}


def test_a_weight_of_ones_would_have_hidden_the_missing_gamma(monkeypatch):
    """E17"""
    import dataclasses

    from samebits import registry

    op = registry.operator("rmsnorm_residual")
    x, gamma = op.spec.forward.inputs
    ones = dataclasses.replace(op.spec.forward, inputs=(x, dataclasses.replace(gamma, sample="ones")))
    monkeypatch.setattr(op, "spec", dataclasses.replace(op.spec, forward=ones))
    assert not failing(look("rmsnorm_residual", faults.missing_gamma))


def test_a_candidate_without_gradient_is_not_a_pass():
    report = look("h_aggregate", faults.not_differentiable)
    assert report.status()["gradient_accuracy"] == report.status()["gradient_invariance"] == "not run"
    assert "not differentiable" in report.check("gradient_accuracy").summary
    assert report.exit_code == 1
    forward = look("h_aggregate", faults.not_differentiable, forward_only=True)
    assert forward.exit_code == 0 and forward.status()["gradient_accuracy"] == "n/a"


def test_operators_pass_and_say_what_they_do_not_promise():
    report = check("rmsnorm_residual", device="cpu", rows=20, contract="tree512")
    assert report.passed
    assert report.options["contract"] == "tree512" and report.options["backend"] == "reference"
    assert "not promised" in report.check("gradient_invariance").notes[0]
    assert "it defines the bits" in report.check("reference_bits").summary
    for axis in ("repeat", "batch", "position", "padding", "chunk", "permutation", "single", "fold", "autograd"):
        assert axis in report.check("gradient_invariance").summary


def test_the_second_upstream_dtype_and_its_refusal():
    assert check("h_aggregate", device="cpu", rows=8, sizes={"D": 24}, dtype=torch.bfloat16).passed
    with pytest.raises(UsageError, match="no input of h_aggregate takes float16"):
        check("h_aggregate", device="cpu", rows=8, dtype=torch.float16)


def test_a_candidate_that_refuses_some_batches_is_reported():
    report = check(faults.needs_multiple_of_seven, device="cpu", rows=14, shapes=["T,5"], only=["batch"])
    failure = report.check("forward_invariance").failures[0]
    assert failure.label == "batch size 1 vs 14"
    assert failure.what == "raised RuntimeError: rows must be a multiple of seven"


def test_every_launch_plan_is_compared(monkeypatch):
    """A backend whose second plan has other bits."""
    from samebits import registry
    from samebits.ops.h_aggregate import reference

    class Planned:
        @staticmethod
        def plans(call):
            return (0, 1)

        @staticmethod
        def run(call, plan, inputs, results, scalars):
            reference.run(call, None, inputs, results, scalars)
            if plan == 1 and call.rows > 1:
                next(iter(results.values())).flatten()[-1:].view(torch.uint8)[:1] ^= 1

    monkeypatch.setitem(registry.operator("h_aggregate")._backends, "reference", Planned)
    report = check("h_aggregate", device="cpu", rows=20, sizes={"D": 24})
    assert axes(report, "forward_invariance") == axes(report, "gradient_invariance") == {"plan"}
    assert "launch plan 0 vs 1 of 2 with 17 rows" in report.check("forward_invariance").summary


def test_the_report_is_json():
    report = look("h_aggregate", faults.leaking)  # its evidence has NaN in it
    stored = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert stored["passed"] is False
    assert stored["options"]["sizes"] == {"D": 40, "H": 4}
    assert {c["name"] for c in stored["checks"]} == set(CHECKS)
    assert stored["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"candidate": "h_agregate"}, "neither an operator nor importable"),
        ({"candidate": "h_aggregate", "contract": "nonsense"}, "no contract named"),
        ({"candidate": "h_aggregate", "backend": "nonsense"}, "no backend named"),
        ({"candidate": "h_aggregate", "backend": "cuda"}, "needs a CUDA tensor"),
        ({"candidate": "h_aggregate", "sizes": {"Q": 3}}, "no axis 'Q'"),
        ({"candidate": "h_aggregate", "device": "nonsense"}, "no device 'nonsense'"),
        ({"candidate": "h_aggregate", "only": ["nonsense"]}, "choose from repeat, batch"),
        ({"candidate": "h_aggregate", "rows": 0}, "at least 1"),
        ({"candidate": "h_aggregate", "shapes": ["T,4"]}, "declares its inputs"),
        ({"candidate": "h_aggregate", "against": "rmsnorm_residual"}, "its own golden"),
        ({"candidate": "torch.mm", "contract": "ascending"}, "no samebits operator"),
        ({"candidate": "torch.mm", "sizes": {"Q": 3}}, "its axes: K, N"),
        ({"candidate": "torch.einsum"}, "--shape T,64"),
        ({"candidate": "torch.float32"}, "not a callable"),
        ({"candidate": "torch:nonsense"}, "there is no 'nonsense' in it"),
        ({"candidate": "nowhere.py:f"}, "no file"),
        ({"candidate": "torch.sigmoid", "shapes": ["64,T"]}, "T first"),
        ({"candidate": "torch.sigmoid", "shapes": ["64"]}, "mark the batch axis"),
        ({"candidate": "torch.bmm", "shapes": ["T,64", "3"]}, "does not accept the inputs"),
        ({"candidate": "torch.numel", "shapes": ["T,64"]}, "as its first axis"),
    ],
)
def test_wrong_use_is_refused_with_the_way_out(call, words):
    with pytest.raises(UsageError) as caught:
        check(**{"device": "cpu", **call})
    assert words in str(caught.value)


def test_nothing_judged_is_no_pass():
    report = check("torch.tanh", device="cpu", rows=3, shapes=["T,4"], only=["plan"])
    assert set(report.status().values()) == {"n/a"}
    assert report.exit_code == 1


def test_it_is_public():
    import samebits

    assert samebits.check is check
