"""``samebits accept``: exit codes, providers by name, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accept import planted
from typer.testing import CliRunner, Result

from samebits import cli
from samebits.accept import golden
from samebits.accept.block import boundary_names
from samebits.accept.cases import CASES

PLANTED = Path(planted.__file__)


def call(*words: Any) -> Result:
    given = ["accept", *map(str, words)]
    return CliRunner().invoke(cli.build(given), given)


def on_cpu(*words: Any) -> Result:
    return call("deepseek-v4", "--device", "cpu", *words)


def test_a_pass_is_zero_and_shows_every_boundary() -> None:
    result = on_cpu("--provider", "reference", "--cases", "one_row, rms_edges")
    assert result.exit_code == 0, result.output
    for name in (*boundary_names(False), "rms.dgamma", "32 of 32", "4 of 4", "2 cases passed"):
        assert name in result.output
    assert "actual_backend pytorch" in result.output


def test_a_failure_is_one_and_names_the_first_divergence() -> None:
    result = on_cpu("--provider", f"{PLANTED}:OneBit", "--cases", "one_row")
    assert result.exit_code == 1
    assert "one_row differs first at post.r_new: row 0, column 2, 5: 0x" in result.output
    assert "30 of 32" in result.output and "1 of 1 cases failed" in result.output


def test_a_row_that_varies_is_named() -> None:
    result = on_cpu("--provider", f"{PLANTED}:BackwardDependsOnOthers", "--cases", "packed_t7_odd")
    assert result.exit_code == 1
    assert "packed_t7_odd: bwd.d_c is not the same row 0 alone (and in 6 more batches): row 0" in result.output


def test_a_stub_says_what_is_missing() -> None:
    result = on_cpu("--provider", "stub", "--cases", "one_row,sinkhorn_edges")
    assert result.exit_code == 1
    assert "one_row: stub has no mhc_pre_fwd" in result.output
    assert "sinkhorn_edges: stub has no hc_split_sinkhorn_fwd" in result.output


@pytest.mark.parametrize("target", ["accept.planted:Right", f"{PLANTED}:Right"])
def test_a_provider_of_the_user(target: str) -> None:
    result = on_cpu("--provider", target, "--cases", "sinkhorn_edges")
    assert result.exit_code == 0 and "provider right on cpu" in result.output


def test_a_module_beside_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from samebits.accept import ReferenceProvider\n\n\nclass Mine(ReferenceProvider):\n    name = 'mine'\n"
    )
    words = ["accept", "deepseek-v4", "--provider", "mine:Mine", "--device", "cpu", "--cases", "rms_edges"]
    source = str(Path(cli.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-m", "samebits.cli", *words],
        cwd=tmp_path,
        env={"PYTHONPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0 and "provider mine on cpu" in run.stdout, run.stderr


def test_without_a_gpu_the_default_is_our_operators() -> None:
    result = on_cpu("--cases", "one_row")
    assert result.exit_code == 0 and "provider operators on cpu" in result.output
    assert "composed" in result.output and "fused" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("deepseek-v9",), "no model named 'deepseek-v9'"),
        (("deepseek-v4", "--provider", "nobody"), "no provider named 'nobody'; choose one of cuda, triton"),
        (("deepseek-v4", "--provider", "nowhere:Class"), "cannot import 'nowhere:Class'"),
        (("deepseek-v4", "--provider", "accept.planted:Nobody"), "there is no 'Nobody' in it"),
        (("deepseek-v4", "--provider", "accept.planted:dataclasses"), "is a module, not a callable"),
        (("deepseek-v4", "--provider", "accept.planted:NoProvider"), "is no provider: it has no numeric_profile"),
        (("deepseek-v4", "--provider", "accept.planted:CannotBeMade"), "could not be made: RuntimeError: no licence"),
        (("deepseek-v4", "--provider", "accept.planted:SaysNothingOfItself"), "provenance() does not say actual_backend"),
        (("deepseek-v4", "--provider", "accept.planted:OtherDevice"), "runs on cuda, not on cpu"),
        (("deepseek-v4", "--provider", "cuda"), "cuda"),
        (("deepseek-v4", "--cases", "one_row,two_rows"), "no case named 'two_rows'; choose from one_row, packed_t16"),
        (("deepseek-v4", "--cases", ","), "no case named; choose from"),
        (("deepseek-v4", "--device", "tpu"), "no device 'tpu'"),
        (("deepseek-v4", "--device", "meta"), "accept"),
        (("deepseek-v4", "--write-golden", "--cases", "one_row"), "records all cases"),
        (("deepseek-v4", "--cases", "rms_edges", "--json", "/nowhere/x.json"), "/nowhere/x.json"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call(*words)
    assert result.exit_code == 2, result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in result.output


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("deepseek-v4", "--device", "cuda")
    assert result.exit_code == 2 and "torch finds no CUDA device here" in result.output


def test_golden_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits import environment

    monkeypatch.setattr(environment, "checkout", lambda: None)
    result = on_cpu("--write-golden")
    assert result.exit_code == 2 and "no checkout" in result.output


def test_golden_is_written_only_by_a_run_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits import environment
    from samebits.accept import run

    (tmp_path / golden.FOLDER).mkdir(parents=True)
    monkeypatch.setattr(environment, "checkout", lambda: tmp_path)
    small = tuple(case for case in CASES if case.name in ("integer_one_row", "sinkhorn_edges"))
    monkeypatch.setattr(run, "chosen", lambda names: small)
    file = tmp_path / golden.FOLDER / f"{golden.NAME}.json"
    result = on_cpu("--provider", "stub", "--write-golden")
    assert result.exit_code == 1 and "nothing recorded" in result.output and not file.exists()
    result = on_cpu("--provider", "reference", "--write-golden")
    assert result.exit_code == 0 and "recorded 7 digests" in result.output, result.output
    stored = json.loads((Path(__file__).parents[1] / "golden" / file.name).read_text())
    written = json.loads(file.read_text())
    assert written["digests"] == {k: v for k, v in stored["digests"].items() if k.startswith("integer_one_row/")}
    assert {k: v for k, v in written.items() if k != "digests"} == {k: v for k, v in stored.items() if k != "digests"}


def test_json_has_every_boundary(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = on_cpu("--provider", f"{PLANTED}:Adds", "--cases", "mixer_frozen,integer_one_row", "--json", file)
    assert result.exit_code == 1 and "grad.d_bias" in result.output
    report = json.loads(file.read_text())
    assert set(report) == {
        *("kind", "schema_version", "numeric_profile", "passed", "model", "provider", "capabilities", "provenance"),
        *("device", "environment", "cases", "golden"),
    }
    assert report["kind"] == "samebits.accept" and report["passed"] is False and report["provider"] == "adds"
    assert report["schema_version"] == "p1-mhc-layer-v1" and report["numeric_profile"] == "oracle-fp32-mhc-v1"
    assert {"requested_backend", "actual_backend", "numeric_profile", "torch_version"} <= set(report["provenance"])
    assert {"backend", "geometry", "devices", "fusion_modes", "trainability", "placements"} <= set(
        report["capabilities"]
    )
    frozen, one = report["cases"]
    assert (
        set(frozen)
        == set(one)
        == {
            *("name", "form", "family", "rows", "hidden", "fusion_mode", "trainability", "passed", "boundaries"),
            *("divergence", "compositions", "varying", "reason", "notes"),
        }
    )
    assert [case["passed"] for case in report["cases"]] == [False, True]
    assert [b["name"] for b in frozen["boundaries"]] == [*boundary_names(True), "grad.d_bias"]
    assert [b["name"] for b in one["boundaries"]] == list(boundary_names(False))
    for case in report["cases"]:
        for boundary in case["boundaries"]:
            assert set(boundary) == {"name", "verdict", "oracle", "provider", "what"}
            same = boundary["oracle"] == boundary["provider"]
            assert (boundary["verdict"] == "same") == same and (boundary["what"] == "") == same
            assert all(side is None or len(side) == 64 for side in (boundary["oracle"], boundary["provider"]))
    assert frozen["boundaries"][-1] | {"provider": ""} == {
        "name": "grad.d_bias",
        "verdict": "extra",
        "oracle": None,
        "provider": "",
        "what": "the oracle has no such boundary",
    }
    assert len(one["notes"]["weight_fingerprint"]) == 64
    assert report["golden"] == [{"file": "mhc_boundaries.json", "status": "same", "compared": 7, "lines": []}]


def test_json_to_standard_output_is_nothing_but_json() -> None:
    result = on_cpu("--provider", "reference", "--cases", "rms_edges", "--json", "-")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["passed"] is True and [case["name"] for case in report["cases"]] == ["rms_edges"]


def test_help_names_it() -> None:
    assert "accept" in CliRunner().invoke(cli.build(["--help"]), ["--help"]).output
    shown = call("--help").output
    for word in ("--provider", "--device", "--cases", "--json", "--write-golden", "deepseek-v4"):
        assert word in shown
