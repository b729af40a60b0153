"""The GPU program without a GPU: what runs, what is left out, and what happens when a part fails."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path

import gpu_record
import pytest
import torch

from samebits import catalogue, environment, registry
from samebits.bench import exercise
from samebits.gpu import __main__ as program
from samebits.gpu import jobs, ledger, parts, plan, tested
from samebits.gpu.jobs import Job

ROOT = environment.checkout()
assert ROOT is not None


def _job(name: str, code: str, part: str = "tests", least: float = 1, most: float = 30, **more) -> Job:
    return Job(part, name, (sys.executable, "-c", code), least, most, **more)


def _setup(tmp_path: Path, entries=(), **changes) -> plan.Setup:
    book = ledger.Ledger(tmp_path / "gpu.json")
    book.record(entries)
    return plan.Setup(
        ROOT, tmp_path, book, **{"ops": catalogue.names(), "chosen": False, "everything": False} | changes
    )


def _entry(key: str, fingerprint: str) -> ledger.Entry:
    return ledger.Entry(key, fingerprint, 1, "commit", "gpu", "torch")


def test_plan_covers_everything(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plan, "sanitizer_path", lambda: "/tools/compute-sanitizer")
    groups = plan.plan(_setup(tmp_path))
    found = [job for group in groups for job in group]
    assert {job.part for job in found} == set(plan.PARTS)
    benches = {job.name for job in found if job.part == "bench"}
    assert benches > {"bench/deepseek_v4", "bench/minimax_h3", *(f"bench/{name}" for name in catalogue.names())}
    assert benches > {"bench/h_aggregate/D=7168", "bench/rmsnorm_residual/D=128", "bench/rmsnorm_residual/D=7168"}
    watched = next(group for group in groups if group[0].part == "sanitizer")
    assert len(watched) == 3 * plan.WATCHERS
    for tool in plan.SANITIZERS:
        seen = [op for job in watched if tool in job.command for op in job.command[-1].split(",")]
        assert sorted(seen) == sorted(catalogue.names())
    for part in ("golden", "check"):
        (job,) = (job for job in found if job.name == part)
        assert set(job.command[-1].split(",")) == set(catalogue.names())
    assert all(sys.executable in job.command for job in found)
    assert all(len({job.name for job in group}) == len(group) for group in groups)


def test_what_is_on_record_is_left_out(tmp_path: Path):
    """A key counts while its fingerprint is that of the code at hand."""
    done, changed, other = "h_aggregate", "mhc_post", "rmsnorm_residual"
    ops = (done, changed, other)
    entries = [_entry(f"check/{done}", ledger.of_operator(done)), _entry(f"check/{changed}", "of older code")]
    entries.append(_entry("accept/cuda", ledger.of_everything()))
    setup = _setup(tmp_path, entries, ops=ops)
    assert setup.todo("check") == [changed, other]
    assert setup.todo("golden") == list(ops)
    names = [job.name for group in plan.plan(setup, ("accept", "check")) for job in group]
    assert names == ["check", "accept/triton"]
    assert _setup(tmp_path, ops=ops, everything=True).todo("check") == list(ops)


def test_named_operators_alone(tmp_path: Path):
    setup = _setup(tmp_path, ops=("h_aggregate",), chosen=True)
    found = [job for group in plan.plan(setup) for job in group]
    assert not [job for job in found if job.part in ("accept", "model")]
    (tests,) = (job for job in found if job.part == "tests")
    assert [word for word in tests.command if word.startswith("tests")] == ["tests/ops/test_h_aggregate.py"]


def test_fingerprints_follow_the_code(tmp_path: Path, monkeypatch):
    """What an operator runs counts, in whatever file it stands; what it does not run, and comments, do not."""

    def fresh() -> dict[str, str]:
        for function in (ledger.of_operator, ledger.lenders, ledger._text):
            function.cache_clear()
        return {op: ledger.of_operator(op) for op in ("h_aggregate", "mhc_pre", "mhc_pre_norm", "mhc_post")}

    before = fresh()
    copy = tmp_path / "samebits"
    subprocess.run(["cp", "-r", str(ledger.PACKAGE), str(copy)], check=True)
    monkeypatch.setattr(ledger, "PACKAGE", copy)
    assert fresh() == before

    def after(name: str, old: str, new: str) -> set[str]:
        path = copy / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        changed = {op for op, value in fresh().items() if value != before[op]}
        path.write_text(text)
        return changed

    assert after("ops/mhc_pre/collapse.cu", "{", "{ int unused = 0;") == {"mhc_pre", "mhc_pre_norm"}
    assert after("ops/mhc_pre/collapse.cu", "{", "{ // a comment\n") == set()
    assert after("ops/mhc_post/cuda.py", '"""', '"""Said otherwise. ') == set()
    assert after("ops/mhc_post/cuda.py", "import annotations", "import annotations  # a comment") == set()
    assert after("ops/mhc_pre_norm/cuda.py", "return", "return None or") == {"mhc_pre_norm"}
    assert after("csrc/sinkhorn.cuh", "{", "{ int unused = 0;") >= {"mhc_pre"}
    assert "h_aggregate" not in after("csrc/sinkhorn.cuh", "{", "{ int unused = 0;")
    assert after("runtime/launch.py", "return", "return None or") == set(before)
    for function in (ledger.of_operator, ledger.lenders, ledger._text):
        function.cache_clear()


def test_test_functions_have_fingerprints_of_their_own():
    path = "tests/ops/test_h_aggregate.py::TestHAggregate::"
    bits = tested.fingerprint(ROOT, f"{path}test_bits_of_every_batch_size")
    layouts = tested.fingerprint(ROOT, f"{path}test_layouts")
    other = tested.fingerprint(ROOT, "tests/ops/test_mhc_post.py::TestMhcPost::test_layouts")
    assert len({bits, layouts, other}) == 3
    assert tested.operator_of(ROOT / "tests/ops/test_mhc_pre_norm.py") == "mhc_pre_norm"
    assert tested.operator_of(ROOT / "tests/ops/test_mhc_pre_backward_plans.py") == "mhc_pre"
    assert tested.operator_of(ROOT / "tests/exact/test_fma.py") is None


def test_operators_of_sequences_are_taken(tmp_path: Path):
    """Their own sources are their fingerprint, their tests are theirs, and every part has them but what needs rows."""
    path = ROOT / "tests" / "sequence_ops" / "test_attention.py"
    assert tested.operator_of(path) == "attention"
    one = tested.fingerprint(ROOT, "tests/sequence_ops/test_attention.py::test_the_bits_of_the_library")
    assert one == ledger.digest((ledger.of_operator("attention"), path.read_text()))
    sources = {place.name for place in ledger.sources_of("attention")}
    assert sources > {"attention_forward.cu", "reference.py", "wgmma.cuh", "tensor_map.py", "operator.py"}
    assert "spec.py" in {p.name for p in ledger.sources_of("attention") if p.parent.name == "attention"}
    found = [job for group in plan.plan(_setup(tmp_path, ops=("attention",), chosen=True)) for job in group]
    assert {job.part for job in found} == {"tests", "golden", "check", "bench", "sanitizer"}
    assert sum(job.part == "bench" for job in found) == 1


SUITE = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_good(n): assert n >= 0

@pytest.mark.parametrize("n", range(3))
def test_bad(n): assert n != 1

def test_proven(): raise AssertionError("left out")
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_record_tells_what_has_passed(tmp_path: Path, workers: tuple[str, ...]):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "proven.json").write_text('["test_suite.py::test_proven"]')
    record = tmp_path / "tests.jsonl"
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "gpu_record",
        "--record",
        str(record),
        "--proven",
        "proven.json",
    ]
    done = subprocess.run(
        [*line, *workers, "test_suite.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"},
        capture_output=True,
    )
    assert done.returncode == 1
    assert tested.passed(record) == {"test_suite.py::test_good": 3}
    assert tested.where(record)["torch"] == metadata.version("torch")
    (failure,) = tested.failures(record)
    assert failure.startswith("test_suite.py::test_bad[1] (call): E ")
    lines = record.read_text().splitlines()
    stopped = [one for one in lines if "test_good[2]" not in one] + ['{"test": "cut o']
    record.write_text("\n".join(stopped))
    assert tested.passed(record) == {}


def test_workers_take_turns_with_the_gpus():
    assert [gpu_record.devices_of(f"gw{n}", None, count=2) for n in range(3)] == ["0,1", "1,0", "0,1"]
    assert gpu_record.devices_of("gw1", "3,5,7") == "5,7,3"
    assert gpu_record.devices_of("gw5", None, count=1) is None
    assert gpu_record.devices_of("gw5", "3") is None


def test_what_a_stopped_run_noted_is_merged(tmp_path: Path, capsys):
    setup = _setup(tmp_path)
    ledger.note(tmp_path, _entry("check/h_aggregate", ledger.of_operator("h_aggregate")))
    with (tmp_path / ledger.LOG).open("a") as stream:
        stream.write('{"key": "check/mhc_')
    assert program._end(setup, [], 0.0) == 0
    assert "1 entries recorded" in capsys.readouterr().out
    assert ledger.Ledger(setup.book.path).has("check/h_aggregate", ledger.of_operator("h_aggregate"))
    left = json.loads((tmp_path / "summary.json").read_text())["left"]
    assert next(line for line in left if line.startswith("check:")).split(": ")[1].split(", ") == [
        name for name in catalogue.names() if name != "h_aggregate"
    ]
    with tarfile.open(tmp_path / program.RECORDS) as archive:
        assert "tests/golden/portable.json" in archive.getnames()


def test_what_is_merged_keeps_the_place_where_it_ran(tmp_path: Path):
    setup = _setup(tmp_path)
    key = "tests/exact/test_fma.py::test_a_gpu_gives_the_same_bits"
    where = {"commit": "c0ffee", "gpu": "NVIDIA Test", "torch": "9.9"}
    told = [{"expected": {key: 1}, "where": where}, {"test": key, "outcome": "passed", "when": "call", "why": ""}]
    (tmp_path / tested.RECORD).write_text("".join(json.dumps(line) + "\n" for line in told))
    assert program._end(setup, [], 0.0) == 0
    entry = ledger.Ledger(setup.book.path).entries[key]
    assert {name: getattr(entry, name) for name in where} == where


def test_failures_are_recorded_and_the_rest_runs(tmp_path: Path):
    groups = [
        [_job("good", "print('fine')")],
        [_job("bad", "print('about to'); raise SystemExit(3)")],
        [_job("absent", "", missing="the tool is not installed")],
        [Job("tests", "no such program", ("/nowhere/tool",), 1, 30)],
        [_job("one", "print(1)"), _job("two", "print(2); import sys; sys.exit(1)")],
    ]
    outcomes = jobs.run(groups, tmp_path, tmp_path, 60)
    assert [o.verdict for o in outcomes] == ["passed", "failed", "failed", "failed", "passed", "failed"]
    assert outcomes[0].detail == "fine"
    assert "exit code 3" in outcomes[1].detail and outcomes[1].tail == ["about to"]
    assert outcomes[2].detail == "the tool is not installed"
    assert "could not be started" in outcomes[3].detail
    assert (tmp_path / outcomes[0].log).read_text() == "fine\n"
    setup = _setup(tmp_path)
    assert program._end(setup, outcomes, 1.0) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [part["verdict"] for part in summary["parts"]][:2] == ["passed", "failed"]
    assert program._end(setup, outcomes[:1], 1.0) == 0


def test_a_hanging_part_is_stopped_with_its_children(tmp_path: Path):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    started = time.monotonic()
    first, second = jobs.run(
        [[_job("hangs", code, most=1.5)], [_job("next", "print('still run')")]], tmp_path, tmp_path, 60
    )
    assert first.verdict == "out of time" and second.verdict == "passed"
    assert time.monotonic() - started < 20


def test_time_is_set_aside_for_later_parts(tmp_path: Path):
    """The first part may not take what the second one needs."""
    groups = [[_job("greedy", "import time; time.sleep(30)", most=30)], [_job("later", "print('run')", least=4)]]
    first, second = jobs.run(groups, tmp_path, tmp_path, 6)
    assert first.verdict == "out of time" and first.seconds < 4
    assert second.verdict == "passed"


def test_no_time_at_all_is_said(tmp_path: Path):
    (outcome,) = jobs.run([[_job("late", "print(1)")]], tmp_path, tmp_path, 0)
    assert outcome.verdict == "not run" and not outcome.passed


def test_a_part_sees_the_sources_and_its_settings(tmp_path: Path):
    code = "import os, samebits; print(os.environ['X'], samebits.__file__)"
    root = environment.checkout()
    assert root is not None
    (outcome,) = jobs.run([[_job("sees", code, settings=(("X", "1"),))]], root, tmp_path, 30)
    assert outcome.detail.startswith("1 ") and str(root / "src") in outcome.detail


def test_sanitizer_that_is_missing_fails(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(plan.shutil, "which", lambda *args, **kwargs: None)
    job = plan.sanitizer("memcheck", ("h_aggregate",), tmp_path)
    assert "not installed" in job.missing
    (outcome,) = jobs.run([[job]], tmp_path, tmp_path, 30)
    assert not outcome.passed


@pytest.mark.parametrize("name", registry.names())
def test_exercise_reaches_every_call(name):
    """The checkers see every contract, dtype, subset of results, and rows that are not aligned."""
    op = registry.operator(name)
    seen = []
    real = op._known

    def spy(*call):
        decision, addresses = real(*call)
        seen.append(decision.call)
        return decision, addresses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_known", spy)
        patch.setattr(exercise, "ROWS", (1, 3))
        free = {axis: 24 for axis, _ in op.spec.tuned}
        odd = op.spec.fitted({a: min(s, 17) for a, s in free.items()})
        even = {a: s if a == "N" else 136 for a, s in free.items()}
        patch.setattr(exercise, "shapes", lambda spec: [(3, odd, False), (3, even, True), (1, even, False)])
        assert exercise.exercise(name, torch.device("cpu"), ("reference",)) > 0
    backward = [call for call in seen if call.backward]
    assert {call.contract for call in seen} == {c.name for c in op.spec.contracts}
    open_dtype = any(r.dtype == "grad" for r in op.spec.backward.results)
    assert {call.grad_dtype for call in backward} == set(op.spec.gradient_dtypes) or not open_dtype
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
    assert all(spec.misfit(size) is None for _, size, _ in shapes)
    for axis, least, most in spec.size_limits:
        met = {size[axis] for _, size, _ in shapes}
        wanted = {min(size, most) for size in exercise.ODD_SIZES} | set(dict(spec.tuned)[axis])
        whole = dict(spec.tuned).get(dict(spec.paired).get(axis))
        assert met >= (wanted if whole is None else {min(size, whole[0]) // 2 * 2 for size in wanted})
        assert all(least <= size <= most for size in met)
        if most >= 131072:
            assert met >= {40000, 131072}
            tuned = dict(spec.tuned).get(axis, ())
            assert all(rows <= 2 for rows, size, _ in shapes if size[axis] >= 40000 and size[axis] not in tuned)


def test_exercise_makes_few_calls_away_from_the_most_rows(monkeypatch):
    """A checker takes its time for every addition of a chain."""
    calls = []
    monkeypatch.setattr(exercise, "LONG", 136)
    for rows, size in ((33, 17), (1, 17), (33, 136)):
        monkeypatch.setattr(exercise, "shapes", lambda spec, rows=rows, size=size: [(rows, {"D": size}, False)])
        calls.append(exercise.exercise("rmsnorm_residual", torch.device("cpu"), ("reference",)))
    # contracts; forward, plain, absent inputs, results, BF16
    assert calls == [2 * (1 + 1 + 2 + 2 + 1), 2 * (1 + 1), 2 * (1 + 1)]
    assert exercise.exercise("rmsnorm_residual", torch.device("cpu"), ("reference",), long_rows=False) == 0


def test_golden_part_on_the_reference(tmp_path: Path, capsys):
    """The CPU reference gives the portable digests; a changed one is found, and what passed is noted."""
    ops = ("h_aggregate", "rmsnorm_residual")
    assert parts.run("golden", ROOT, tmp_path, "cpu", ops, 100) == 0, capsys.readouterr().out
    assert [one.key for one in ledger.noted(tmp_path)] == [f"golden/{op}" for op in ops]
    content = json.loads((tmp_path / "cpu.json").read_text())
    golden = tmp_path / "tests" / "golden"
    golden.mkdir(parents=True)
    key = next(key for key in json.loads((ROOT / "tests/golden/portable.json").read_text())["digests"] if ops[0] in key)
    stored = {"digests": {key: "0" * 64}}
    (golden / "portable.json").write_text(json.dumps(stored))
    assert set(content["digests"]) > set(stored["digests"]) or content["digests"]
    assert parts.run("golden", tmp_path, tmp_path, "cpu", ops[:1], 100) == 1
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
    assert parts.run("check", tmp_path, tmp_path, "cpu", ops, 100) == 1
    assert "RuntimeError: planted" in capsys.readouterr().out
    reports = json.loads((tmp_path / "check_cpu.json").read_text())
    assert {report["candidate"] for report in reports} == set(ops[1:])
    assert [one.key for one in ledger.noted(tmp_path)] == [f"check/{ops[1]}"]
    assert parts.run("check", tmp_path, tmp_path, "cpu", ops[1:], 100) == 0
    assert len(json.loads((tmp_path / "check_cpu.json").read_text())) == len(reports)
    assert parts.run("check", tmp_path, tmp_path, "cpu", ops, -1) == 1
    assert "no time was left" in capsys.readouterr().out


def test_a_memory_checker_that_finds_something_fails(tmp_path: Path, monkeypatch, capsys):
    for code, expected in ((0, 0), (9, 1)):
        told = [sys.executable, "-c", f"print('ERROR SUMMARY'); raise SystemExit({code})"]
        monkeypatch.setattr(parts, "watcher", lambda tool, told=told: told)
        assert parts.run("memcheck", ROOT, tmp_path, "cpu", ("h_aggregate",), 60) == expected
    assert "ERROR SUMMARY" in capsys.readouterr().out
    assert [one.key for one in ledger.noted(tmp_path)] == ["memcheck/h_aggregate"]


def test_refusals(capsys, monkeypatch, tmp_path: Path):
    assert program.main(["--only", "everything", "--out", str(tmp_path)]) == 2
    assert program.main(["--ops", "nothing", "--out", str(tmp_path)]) == 2
    monkeypatch.setattr(program, "_gpu_here", lambda: False)
    assert program.main(["--out", str(tmp_path)]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert program.main(["--list", "--arch", "sm_00", "--out", str(tmp_path)]) == 0
    assert "golden: " in capsys.readouterr().out
