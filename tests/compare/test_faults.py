"""Every planted fault is reported as what it is, and a clean peer as clean."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib import metadata

import pytest
from compare import planted

from samebits.compare import child, contestant, entries, process, show
from samebits.compare.process import in_mode
from samebits.compare.request import Request
from samebits.compare.run import failures, run
from samebits.compare.scale import Scale

SCALE = Scale(
    alone=(3, 20), full=24, sweep=17, judged=20, timed=(1, 5), seeds=(3,), repeats=3, compile=False, seconds=0.0
)
REQUEST = Request("rmsnorm_residual", "ascending", "reference", "cpu", {"D": 8}, SCALE, planted.__file__)
CHECKS = ("all_rows", "full_vs_sub_batches", "batch_size_sweep")


@pytest.fixture(scope="module")
def report():
    """All planted peers, and one mode in a process of its own."""
    return run(REQUEST)


@pytest.fixture
def entry(report):
    return {entry["name"]: entry for entry in report["contestants"]}


def failing(entry):
    return [name for name in CHECKS if entry["invariance"][name]["passed"] is not True]


def test_a_clean_peer_is_clean(entry):
    for name in ("samebits", "clean"):
        found = entry[name]
        assert found["status"] == "compared" and found["reason"] is None
        assert found["invariance"]["batch_invariant"] and found["invariance"]["repeatable"]
        assert found["invariance"]["params_repeatable"] is True
        assert all(found["invariance"][check]["compared"] > 0 for check in CHECKS)
        assert found["accuracy"].keys() == {"y", "residual", "grad_x", "grad_gamma"}
        assert all(error["tolerance_used"] < 0.5 for error in found["accuracy"].values())
    same = entry["clean"]["equality"]
    assert same["same"] and same["same_results"] and same["same_gradients"]
    assert same["batches"] == [1, 3, 20] and len(same["tensors"]) == 4


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("20 rows", "all_rows", "y, alone against in a batch of 20"),
        ("24 rows", "full_vs_sub_batches", "of a batch of 24 against a batch of their own"),
        ("17 rows", "batch_size_sweep", "alone against front of 17"),
    ],
)
def test_each_check_finds_what_only_it_can_find(entry, name, check, words):
    found = entry[name]
    assert failing(found) == [check]
    assert not found["invariance"]["batch_invariant"] and found["invariance"]["repeatable"]
    assert words in found["invariance"]["first_failure"]
    assert found["invariance"][check]["first_failures"][0] in found["invariance"]["first_failure"]
    assert found["equality"]["same"] is (name != "20 rows")  # bits are compared at 1, 3 and 20 rows


def test_a_gradient_that_depends_on_the_batch(entry):
    found = entry["batchwise gradient"]
    assert failing(found) == list(CHECKS)
    assert found["invariance"]["first_failure"].startswith("all_rows: grad_x")
    assert found["equality"]["same_results"] is True and found["equality"]["same_gradients"] is False


def test_other_bits(entry):
    found = entry["other bits"]
    assert failing(found) == []
    seen = found["equality"]["tensors"]
    assert {name: tensor["same"] for name, tensor in seen.items()} == {
        "y": False, "residual": True, "grad_x": True, "grad_gamma": True,
    }  # fmt: skip
    assert seen["y"]["differing"] == seen["y"]["elements"] == 24 * 8
    assert "in a batch of 1" in seen["y"]["first"] and "ulp apart" in seen["y"]["first"]
    assert found["accuracy"]["y"]["relative"] > 1e-4 and found["accuracy"]["y"]["correctly_rounded"] < 0.1


@pytest.mark.parametrize(("name", "tensor"), [("other dtype", "y"), ("narrow gamma", "grad_gamma")])
def test_another_dtype_is_a_difference(entry, name, tensor):
    seen = entry[name]["equality"]["tensors"][tensor]
    assert (
        not entry[name]["equality"]["same"] and "torch.float32" in seen["first"] and "torch.bfloat16" in seen["first"]
    )
    assert seen["differing"] == seen["elements"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("extra output", "3 results instead of 2 (y, residual)"),
        ("too few", "1 results instead of 2 (y, residual)"),
        ("frozen gamma", "no gradient of gamma"),
    ],
)
def test_another_number_of_outputs_is_a_difference(report, entry, name, words):
    found = entry[name]["equality"]
    assert found["same"] is False and words in found["miscounted"]
    assert any(words in note for note in show.notes(report))


def test_a_peer_that_raises_has_failed(report, entry):
    assert entry["raises"]["status"] == "failed" and entry["raises"]["reason"] == "ArithmeticError: planted"
    assert entry["raises"]["invariance"] is None and not report["passed"]
    assert "raises failed: ArithmeticError: planted" in report["failures"]


@pytest.mark.parametrize("name", ["lacks a library", "needs a library", "in a mode, absent"])
def test_a_missing_library_is_unavailable_and_no_pass(entry, name):
    found = entry[name]
    assert found["status"] == "unavailable"
    assert found["reason"] == "ModuleNotFoundError: No module named 'no_such_library'"
    assert set(show.verdicts(found).values()) == {None} and found["latency"] == []


def test_what_needs_a_gpu_is_unavailable(entry):
    assert entry["needs a GPU"]["status"] == entry["in a mode, gpu"]["status"] == "unavailable"
    assert "GPU" in entry["needs a GPU"]["reason"]


def test_a_gradient_that_does_not_repeat(entry):
    found = entry["drifting gamma"]["invariance"]
    assert found["batch_invariant"] and not found["repeatable"] and found["params_repeatable"] is False
    assert found["rows_repeat"]["passed"] is True
    assert found["first_failure"].startswith("parameter repeat: grad_gamma, run 1 against run 2")


def test_part_of_an_operator_is_compared_with_the_same_part_of_ours(entry):
    """Behind y alone our gradient of x is another one, and so is the golden's."""
    found = entry["norm alone"]
    assert found["equality"]["same"] is True
    assert found["equality"]["tensors"].keys() == {"y", "grad_x", "grad_gamma"}
    assert found["accuracy"]["grad_x"]["tolerance_used"] < 0.5
    assert found["accuracy"]["grad_x"] != entry["clean"]["accuracy"]["grad_x"]


def test_a_forward_alone(entry):
    found = entry["forward alone"]
    assert found["equality"]["same"] is True and found["equality"]["same_gradients"] is None
    assert found["invariance"]["params_repeatable"] is None and found["invariance"]["batch_invariant"]
    assert {time["direction"] for time in found["latency"]} == {"fwd"}


def test_times_are_of_the_same_rounds_in_turn(entry):
    found = entry["clean"]["latency"]
    cases = [(d, rows) for rows in (1, 5) for d in ("fwd", "bwd", "fwd+bwd")]
    assert [(time["direction"], time["rows"]) for time in found] == cases
    mine = {(time["direction"], time["rows"]): time for time in entry["samebits"]["latency"]}
    for time in found:
        there, back = time["order"]
        assert there[0] == "ascending/reference" and "clean" in there and back == there[::-1]
        assert time["ours_us"] == mine[time["direction"], time["rows"]]["us"]
        assert time["ratio"] == pytest.approx(time["us"] / time["ours_us"], rel=1e-2)
        assert time["us_min"] <= time["us"] <= time["us_max"] and time["rounds"] >= 2
        assert time["extra_bytes"] is None  # a CPU does not say
    untimed = entry["extra output"]["latency"]
    assert [("failed" in time) for time in untimed] == [False, True, True] * 2


def test_a_mode_has_a_process_of_its_own(entry):
    usual, moded = entry["in a mode"], entry["in a mode, planted"]
    assert usual["equality"]["same"] is True and usual["process"]["deterministic_algorithms"] is False
    assert moded["status"] == "compared", moded["reason"]
    assert moded["equality"]["same_results"] is False and moded["ours_keeps_bits"] is True
    assert moded["process"]["deterministic_algorithms"] is True
    assert moded["invariance"]["batch_invariant"] and len(moded["latency"]) == 6


def test_a_mode_with_a_typo_has_failed(tmp_path):
    """In the process of the mode, before anything is computed there."""
    peers = tmp_path / "peers.py"
    peers.write_text("import dataclasses\nfrom compare.planted import NOT_A_SWITCH, PEERS\n"
                     "PEERS = (dataclasses.replace(PEERS[0], modes=(NOT_A_SWITCH,)),)\n")  # fmt: skip
    request = dataclasses.replace(REQUEST, peers_file=str(peers))
    found = child.answer({"request": json.loads(json.dumps(request.to_json())), "peer": "clean", "mode": "typo"})
    assert (found["name"], found["status"]) == ("clean, typo", "failed")
    assert "allow_tf23 is no switch of torch" in found["reason"]
    assert failures([found, found])[-1] == "no peer could be compared"


def test_a_process_that_dies_has_failed(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    found = in_mode(planted.PEERS[-1], planted.MODE, REQUEST, {})
    assert found["status"] == "failed" and "its process ended with code 1" in found["reason"]


@pytest.mark.parametrize(
    ("digests", "status", "keeps"),
    [
        ({"inputs": "a", "ours": "b"}, "compared", True),
        ({"inputs": "a", "ours": "c"}, "compared", False),
        ({"inputs": "d", "ours": "b"}, "failed", None),
    ],
)
def test_a_process_must_compare_the_same(monkeypatch, entry, digests, status, keeps):
    monkeypatch.setattr(process, "_child", lambda *given: entry["in a mode, planted"] | {"digests": digests})
    monkeypatch.delitem(entry["in a mode, planted"], "ours_keeps_bits")
    found = in_mode(planted.PEERS[-1], planted.MODE, REQUEST, {"inputs": "a", "ours": "b"})
    assert found["status"] == status and found.get("ours_keeps_bits") is keeps
    told = failures([entry["samebits"], found])
    assert bool(told) == (keeps is not True)
    assert any("other bits under planted" in text for text in told) == (keeps is False)


def test_a_compiled_peer_is_left_out_where_nobody_wants_it(entry):
    assert entry["compiled"]["status"] == "left out" and "--compile" in entry["compiled"]["reason"]


def test_the_report_is_json_and_a_table(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["kind"], report["schema"], report["op"]) == ("samebits.compare", 1, "rmsnorm_residual")
    assert report["environment"]["torch"] == metadata.version("torch")
    shown = show.table_of(report)
    ran = [entry for entry in report["contestants"] if entry["status"] in ("compared", "failed")]
    assert shown.row_count == len(ran) < len(report["contestants"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (planted.in_batches_of(20), "samebits is not batch-invariant: all_rows: y"),
        (planted.drifting_gamma, "samebits does not repeat: parameter repeat: grad_gamma"),
        (lambda x, gamma, eps: planted.clean(x, gamma * 2, eps), "samebits: the error of y is"),
        (planted.raises, "samebits failed: ArithmeticError: planted"),
    ],
)
def test_a_fault_of_ours_is_a_failure(monkeypatch, tmp_path, fault, words):
    def broken(op, contract, backend):
        return lambda *given, **scalars: fault(*given[:2], 1e-6)

    monkeypatch.setattr(contestant, "ours", broken)
    peers = tmp_path / "peers.py"
    peers.write_text("from compare.planted import PEERS\nPEERS = (PEERS[0], PEERS[-1])\n")
    monkeypatch.setattr(
        process, "_child", lambda peer, mode, request: entries.not_compared(peer, mode, "left out", "-")
    )
    found = run(dataclasses.replace(REQUEST, peers_file=str(peers), latency=False))
    assert not found["passed"] and any(text.startswith(words) for text in found["failures"])
    if fault is planted.raises:
        assert [entry["status"] for entry in found["contestants"][1:]] == ["left out"] * 5  # two peers, three modes
