"""The GPU program without a GPU: what runs, what happens when a part fails, hangs or is missing, and the parts themselves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from samebits import environment, gpu_program, registry
from samebits.bench import exercise
from samebits.gpu_program import Job


def _job(name: str, code: str, part: str = "tests", least: float = 1, most: float = 30, **more) -> Job:
    return Job(part, name, (sys.executable, "-c", code), least, most, **more)


def test_plan_covers_everything(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gpu_program, "sanitizer_path", lambda: "/tools/compute-sanitizer")
    groups = gpu_program.plan(tmp_path, tmp_path)
    jobs = [job for group in groups for job in group]
    assert tuple(dict.fromkeys(job.part for job in jobs)) == gpu_program.PARTS
    benches = {job.name for job in jobs if job.part == "bench"}
    assert benches > {"bench deepseek_v4", *(f"bench {name}" for name in registry.names())}
    assert benches > {"bench h_aggregate D=7168", "bench rmsnorm_residual D=128", "bench rmsnorm_residual D=7168"}
    assert ["memcheck", "racecheck", "initcheck"] in [[job.name for job in group] for group in groups]
    assert all(sys.executable in job.command for job in jobs)
    assert sum(max(job.least for job in group) for group in groups) < gpu_program.SECONDS - 100
    assert all(len({job.name for job in group}) == len(group) for group in groups)


def test_failures_are_recorded_and_the_rest_runs(tmp_path: Path):
    groups = [
        [_job("good", "print('fine')")],
        [_job("bad", "print('about to'); raise SystemExit(3)")],
        [_job("absent", "", missing="the tool is not installed")],
        [Job("tests", "no such program", ("/nowhere/tool",), 1, 30)],
        [_job("one", "print(1)"), _job("two", "print(2); import sys; sys.exit(1)")],
    ]
    outcomes = gpu_program.run(groups, tmp_path, tmp_path, 60)
    assert [o.verdict for o in outcomes] == ["passed", "failed", "failed", "failed", "passed", "failed"]
    assert outcomes[0].detail == "fine"
    assert "exit code 3" in outcomes[1].detail and outcomes[1].tail == ["about to"]
    assert outcomes[2].detail == "the tool is not installed"
    assert "could not be started" in outcomes[3].detail
    assert (tmp_path / outcomes[0].log).read_text() == "fine\n"
    assert gpu_program._summarise(outcomes, tmp_path, 1.0) == 1
    assert [p["verdict"] for p in json.loads((tmp_path / "summary.json").read_text())["parts"]][:2] == [
        "passed",
        "failed",
    ]
    assert gpu_program._summarise(outcomes[:1], tmp_path, 1.0) == 0


def test_a_hanging_part_is_stopped_with_its_children(tmp_path: Path):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    started = time.monotonic()
    first, second = gpu_program.run(
        [[_job("hangs", code, most=1.5)], [_job("next", "print('still run')")]], tmp_path, tmp_path, 60
    )
    assert first.verdict == "out of time" and second.verdict == "passed"
    assert time.monotonic() - started < 20


def test_time_is_set_aside_for_later_parts(tmp_path: Path):
    """The first part may not take what the second one needs."""
    groups = [[_job("greedy", "import time; time.sleep(30)", most=30)], [_job("later", "print('run')", least=4)]]
    first, second = gpu_program.run(groups, tmp_path, tmp_path, 6)
    assert first.verdict == "out of time" and first.seconds < 4
    assert second.verdict == "passed"


def test_no_time_at_all_is_said(tmp_path: Path):
    (outcome,) = gpu_program.run([[_job("late", "print(1)")]], tmp_path, tmp_path, 0)
    assert outcome.verdict == "not run" and not outcome.passed


def test_a_part_sees_the_sources_and_its_settings(tmp_path: Path):
    code = "import os, samebits; print(os.environ['X'], samebits.__file__)"
    root = environment.checkout()
    assert root is not None
    (outcome,) = gpu_program.run([[_job("sees", code, settings=(("X", "1"),))]], root, tmp_path, 30)
    assert outcome.detail.startswith("1 ") and str(root / "src") in outcome.detail


def test_sanitizer_that_is_missing_fails(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(gpu_program.shutil, "which", lambda *args, **kwargs: None)
    job = gpu_program._sanitizer("memcheck", tmp_path, ())
    assert "not installed" in job.missing
    (outcome,) = gpu_program.run([[job]], tmp_path, tmp_path, 30)
    assert not outcome.passed


@pytest.mark.parametrize("name", registry.names())
def test_exercise_reaches_every_call(name):
    """The checkers see every contract, dtype, subset of results, and rows that are not aligned."""
    op = registry.operator(name)
    seen = []
    real = op._decision

    def spy(*call):
        decision = real(*call)
        seen.append(decision.call)
        return decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_decision", spy)
        patch.setattr(exercise, "ROWS", (1, 3))
        free = {axis: 24 for axis, _ in op.spec.tuned}
        odd, even = {a: min(s, 17) for a, s in free.items()}, {a: s if a == "N" else 136 for a, s in free.items()}
        patch.setattr(exercise, "shapes", lambda spec: [(3, odd, False), (3, even, True), (1, even, False)])
        assert exercise.exercise(name, torch.device("cpu"), ("reference",)) > 0
    backward = [call for call in seen if call.backward]
    assert {call.contract for call in seen} == {c.name for c in op.spec.contracts}
    open_dtype = any(r.dtype == "grad" for r in op.spec.backward.results)
    assert {call.grad_dtype for call in backward} == {"float32", "bfloat16"} or not open_dtype
    assert {call.wanted for call in backward} >= {(r.name,) for r in op.spec.backward.results}
    for arg in op.spec.backward.inputs:
        if arg.name.startswith("grad_"):
            assert {call.layout(arg.name).dtype for call in backward if call.has(arg.name)} == set(arg.dtypes)
        assert arg.optional == any(not call.has(arg.name) for call in backward)
    assert {layout.aligned for call in seen for _, layout in call.layouts} == {True, False}


@pytest.mark.parametrize("name", registry.names())
def test_exercise_shapes(name):
    spec = registry.spec(name)
    shapes = list(exercise.shapes(spec))
    assert {rows for rows, _, _ in shapes} >= set(exercise.ROWS)
    assert any(strided for _, _, strided in shapes)
    for axis, least, most in spec.size_limits:
        met = {size[axis] for _, size, _ in shapes}
        assert met >= {min(size, most) for size in exercise.ODD_SIZES} | set(dict(spec.tuned)[axis])
        assert all(least <= size <= most for size in met)
        if most >= 131072:
            assert met >= {40000, 131072}
            assert all(rows <= 2 for rows, size, _ in shapes if size[axis] >= 40000)


def test_exercise_makes_few_calls_with_long_rows(monkeypatch):
    """A checker takes its time for every addition of a chain; what long rows are for is their way through shared memory."""
    calls = []
    monkeypatch.setattr(exercise, "LONG", 136)
    for size in (17, 136):
        monkeypatch.setattr(exercise, "shapes", lambda spec, size=size: [(1, {"D": size}, False)])
        calls.append(exercise.exercise("rmsnorm_residual", torch.device("cpu"), ("reference",)))
    assert calls == [2 * (1 + 1 + 2 + 2 + 1), 2 * (1 + 1)]  # contracts; forward, plain, absent inputs, results, BF16


def test_golden_part_on_the_reference(tmp_path: Path, capsys):
    """The CPU reference gives the portable digests; a changed one is found."""
    root = environment.checkout()
    assert root is not None
    ops = ("h_aggregate", "rmsnorm_residual")
    assert gpu_program._golden_part(root, tmp_path, "cpu", ops) == 0, capsys.readouterr().out
    content = json.loads((tmp_path / "cpu.json").read_text())
    key = next(iter(content["digests"]))
    golden = tmp_path / "tests" / "golden"
    golden.mkdir(parents=True)
    content["digests"][key] = "0" * 64
    (golden / "portable.json").write_text(json.dumps(content))
    assert gpu_program._golden_part(tmp_path, tmp_path, "cpu", ops) == 1
    assert f"not the portable bits: {key}" in capsys.readouterr().out


def test_check_part_records_what_fails(tmp_path: Path, monkeypatch, capsys):
    from samebits import verify

    real = verify.check
    ops = ("h_aggregate", "rmsnorm_residual")

    def check(name, **options):
        if name == ops[0]:
            raise RuntimeError("planted")
        return real(name, **options | {"rows": 3, "sizes": {"D": 64}, "only": ["batch"], "forward_only": True})

    monkeypatch.setattr(verify, "check", check)
    assert gpu_program._check_part(tmp_path, tmp_path, "cpu", 100, ops) == 1
    assert "RuntimeError: planted" in capsys.readouterr().out
    reports = json.loads((tmp_path / "check_cpu.json").read_text())
    assert {report["candidate"] for report in reports} == set(ops[1:])
    assert gpu_program._check_part(tmp_path, tmp_path, "cpu", -1, ops) == 1
    assert "no time was left" in capsys.readouterr().out


def test_refusals(capsys, monkeypatch, tmp_path: Path):
    assert gpu_program.main(["--only", "everything", "--out", str(tmp_path)]) == 2
    monkeypatch.setattr(gpu_program, "_gpu_here", lambda: False)
    assert gpu_program.main(["--out", str(tmp_path)]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_whole_program_with_stubbed_parts(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(gpu_program, "_gpu_here", lambda: True)
    monkeypatch.setattr(
        gpu_program, "plan", lambda root, out, ops: [[_job("a", "print(1)")], [_job("b", "print(2)", part="bench")]]
    )
    assert gpu_program.main(["--only", "tests,bench", "--out", str(tmp_path)]) == 0
    assert "all parts passed" in capsys.readouterr().out
