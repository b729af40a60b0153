"""The recorded digests of the oracle on the integer inputs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import samebits
from samebits import accept as acceptance
from samebits.accept import golden
from samebits.accept.block import boundary_names
from samebits.accept.cases import CASES
from samebits.accept.reference import ReferenceProvider
from samebits.accept.trace import Trace
from samebits.exact.bits import digest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / golden.FOLDER
PORTABLE = FOLDER / f"{golden.NAME}.json"
CPU = torch.device("cpu")


def traces(*names: str) -> dict[str, Trace]:
    return {case.name: case.workload(CPU).run(ReferenceProvider()) for case in CASES if case.name in names}


@pytest.fixture(scope="module")
def everything() -> dict[str, Trace]:
    return traces(*golden.recorded_cases())


def test_every_boundary_is_either_portable_or_names_its_device_functions() -> None:
    names = {*boundary_names(False), "gemm.y", "gemm.dx", "gemm.dweight"}
    assert set(golden.PORTABLE) | set(golden.DEVICE_FUNCTIONS) == names
    assert not set(golden.PORTABLE) & set(golden.DEVICE_FUNCTIONS)
    assert json.loads(PORTABLE.read_text())["not_here"] == golden.DEVICE_FUNCTIONS


def test_the_recorded_digests_are_those_of_the_reference(everything: dict[str, Trace]) -> None:
    (judged,) = golden.judge(everything, CPU)
    assert judged.status == "same" and judged.lines == ()
    assert judged.compared == 7 * (len(golden.recorded_cases()) - 1) + 3
    stored = json.loads(PORTABLE.read_text())["digests"]
    now = golden.digests(everything)
    assert {key: value for key, value in now.items() if golden.is_portable(key)} == stored


def test_a_cpu_gives_every_boundary_of_the_gpu() -> None:
    """A whole layer, forward and backward, with the GPU's exp, sigmoid and rsqrt."""
    with samebits.bits_of("sm_90"):
        now = golden.digests(traces(*golden.recorded_cases()))
    assert now == json.loads((FOLDER / f"{golden.NAME}.sm_90.json").read_text())["digests"]


@pytest.mark.parametrize("library", ["COMPATIBLE", "AVX2"])
def test_no_vector_unit_and_no_library_path_changes_them(library: str) -> None:
    """In a process of its own, where torch takes plain vectors and MKL, if torch has it, another code path."""
    script = (
        "import json, torch\n"
        "from samebits.accept import golden\n"
        "from samebits.accept.cases import CASES\n"
        "from samebits.accept.reference import ReferenceProvider\n"
        "cpu = torch.device('cpu')\n"
        "small = [c for c in CASES if c.family == 'integer' and c.contract.hidden < 4096]\n"
        "(judged,) = golden.judge({c.name: c.workload(cpu).run(ReferenceProvider()) for c in small}, cpu)\n"
        "print(json.dumps([judged.status, judged.compared, judged.lines]))\n"
    )
    known = os.environ | {"PYTHONPATH": str(ROOT / "src"), "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": library}
    run = subprocess.run([sys.executable, "-c", script], env=known, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == ["same", 45, []]


def test_a_changed_a_missing_and_a_new_digest_are_seen(
    everything: dict[str, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden.environment, "checkout", lambda: tmp_path)
    file = tmp_path / golden.FOLDER / PORTABLE.name
    file.parent.mkdir(parents=True)
    assert [judged.status for judged in golden.judge(everything, CPU)] == ["absent"]
    stored = json.loads(PORTABLE.read_text())

    def told(change: dict[str, str], lost: str = "") -> list[str]:
        digests = {key: value for key, value in (stored["digests"] | change).items() if key != lost}
        file.write_text(json.dumps(stored | {"digests": digests}))
        (judged,) = golden.judge(everything, CPU)
        assert judged.status == ("differs" if judged.lines else "same")
        return [line.split(":")[0] for line in judged.lines]

    assert told({}) == []
    assert told({"integer_t16/bwd.d_c": "0" * 64}) == ["integer_t16/bwd.d_c"]
    assert told({}, lost="fixed_k_gemm/gemm.dx") == ["fixed_k_gemm/gemm.dx"]
    assert told({"integer_t16/new": "0" * 64}) == ["integer_t16/new"]
    assert golden.judge({name: everything[name] for name in ("integer_t16",)}, CPU)[0].lines != ()
    assert golden.judge({name: everything[name] for name in ("integer_fused",)}, CPU)[0].status == "same"


def test_a_golden_that_differs_fails_the_report() -> None:
    report = acceptance.accept(provider="reference", device="cpu", cases=["integer_one_row"])
    assert report.passed and [judged.status for judged in report.golden] == ["same"]
    wrong = golden.Judgement("x.json", "differs", 1, ("a: stored b, now c",))
    assert not dataclasses.replace(report, golden=[wrong]).passed
    assert dataclasses.replace(report, golden=[golden.Judgement("x.json", "absent")]).passed


def test_a_gpu_file_holds_every_boundary_and_agrees_where_it_is_portable() -> None:
    """Whatever architectures are recorded; and the rule itself, on a file made up here."""
    stored = json.loads(PORTABLE.read_text())["digests"]

    def disagreements(digests: dict[str, str]) -> list[str]:
        keys = {
            f"{case.name}/{name}" for case in CASES if case.name in golden.recorded_cases() for name in _names(case)
        }
        wrong = [key for key, value in stored.items() if digests.get(key) != value]
        return wrong + sorted(keys ^ digests.keys())

    for file in sorted(FOLDER.glob(f"{golden.NAME}.sm_*.json")):
        assert disagreements(json.loads(file.read_text())["digests"]) == [], file.name
    whole = {f"{case.name}/{name}": "" for case in CASES if case.family == "integer" for name in _names(case)} | stored
    assert disagreements(whole) == []
    key = "integer_t16/controller.r"
    assert disagreements(whole | {key: "0" * 64}) == [key]
    assert disagreements({k: v for k, v in whole.items() if k != "integer_t16/split.pre"}) == ["integer_t16/split.pre"]


def _names(case: object) -> tuple[str, ...]:
    if case.operators is not None:  # type: ignore[attr-defined]
        return ("gemm.y", "gemm.dx", "gemm.dweight")
    return boundary_names(case.contract.mixer_frozen)  # type: ignore[attr-defined]


def test_writing_is_what_is_committed(everything: dict[str, Trace], tmp_path: Path) -> None:
    count = golden.write(tmp_path / "again.json", everything, CPU)
    assert count == 59 and (tmp_path / "again.json").read_text() == PORTABLE.read_text()


def test_equal_tokens_have_equal_digests(everything: dict[str, Trace]) -> None:
    """Cases of one width share their tokens, so the digests of one case can be read off another."""
    t16 = everything["integer_t16"]
    for name in ("controller.p", "split.c", "bwd.d_r_old"):
        assert everything["integer_fused"][name].digest == everything["integer_frozen"][name].digest == t16[name].digest
        assert everything["integer_one_row"][name].digest == digest(t16[name].tensor[:1])
    assert everything["fixed_k_gemm"]["gemm.y"].digest == t16["controller.p"].digest
