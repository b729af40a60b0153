"""``python -m samebits.emulate``: exit codes, one line for wrong use, what the JSON holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samebits.emulate import __main__ as command
from samebits.emulate import build, judge
from samebits.emulate.cases import Case
from samebits.emulate.judge import Finding
from samebits.ops.timestep_sinusoid import cuda

SMALL = ["timestep_sinusoid", "--size", "F=17", "--rows", "3"]


def test_the_same_bits_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert command.main([*SMALL, "--json", str(file)]) == 0
    assert " 0 findings" in capsys.readouterr().out
    (report,) = json.loads(file.read_text())
    assert report["op"] == "timestep_sinusoid" and report["findings"] == []
    assert report["calls"] >= 4 and any(name.startswith("backward[") for name in report["kernels"])


def test_a_kernel_that_is_not_modelled_is_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(cuda, "GPU_ONLY", ("backward",), raising=False)
    assert command.main([*SMALL, "--json", str(file)]) == 0
    assert "timestep_sinusoid: backward was NOT run" in capsys.readouterr().out
    (report,) = json.loads(file.read_text())
    assert report["not_emulated"] == ["backward"]
    assert report["kernels"] and not any(name.startswith("backward[") for name in report["kernels"])


def test_a_finding_is_1_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(case: Case, **options: str) -> list[Finding]:
        return [Finding(case, "grad_timestep differs")] if case.call.backward else list(judge.findings(case, **options))

    monkeypatch.setattr(command, "findings", wrong)
    assert command.main(SMALL) == 1
    printed = capsys.readouterr().out
    assert "T=3 F=17" in printed and "grad_timestep differs" in printed


@pytest.mark.parametrize(
    "given, words",
    [
        (["no_such_operator"], "no_such_operator: choose from"),
        (["timestep_sinusoid", "--size", "K=4"], "--size K=4"),
        (["timestep_sinusoid", "--size", "F"], "expected AXIS=NUMBER"),
        (["timestep_sinusoid", "--rows", "0"], "launches no kernel"),
        (["timestep_sinusoid", "--size", "F=17", "--most", "1"], "--most allows more"),
    ],
)
def test_wrong_use_is_2_and_one_line(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(given) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_no_compiler_is_2_and_says_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = (build.compiler, build._folder, build.runtime)
    for function in cached:
        function.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        assert command.main(SMALL) == 2
    finally:
        for function in cached:
            function.cache_clear()
    assert "g++ (tried: GCC 12), which is not installed" in capsys.readouterr().err
