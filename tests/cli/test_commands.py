"""The command line: what it prints, how it fails, and that listing stays light."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from samebits import catalogue, cli, environment, registry

SOURCE = Path(cli.__file__).parents[2]


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.build(words), list(words))


def fresh(words: Sequence[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where nothing has been imported before."""
    known = dict(os.environ) | {"PYTHONPATH": str(SOURCE)} | settings
    return subprocess.run([sys.executable, *words], env=known, capture_output=True, text=True, timeout=120)


def test_list_imports_no_torch_and_is_fast():
    script = (
        "import sys, time; begun = time.process_time()\n"
        "from samebits import cli\n"
        "sys.argv = ['samebits', 'list', '--json']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'triton', 'numpy', 'cuda') if m in sys.modules]\n"
        "print(time.process_time() - begun, heavy, file=sys.stderr)"
    )
    runs = [fresh(["-c", script]) for _ in range(3)]
    assert all(run.stderr.strip().endswith("[]") for run in runs), runs[0].stderr
    fastest = min(float(run.stderr.split()[0]) for run in runs)
    assert fastest < 1.0  # processor time, so that a busy machine does not matter; about 0.3 s
    listed = json.loads(runs[0].stdout)
    declared = [(name, c.name) for name in catalogue.names() for c in catalogue.declared(name).contracts]
    assert [(entry["operator"], entry["contract"]) for entry in listed] == declared
    assert sum(entry["default"] for entry in listed) == len(catalogue.names())


def test_list_shows_where_proven(monkeypatch):
    from samebits.cli import listing

    monkeypatch.setattr(
        listing, "golden_files", lambda: {"sm_90": {"digests": {"h_aggregate/tree256/forward/t/hidden": "0"}}}
    )
    entries = {(e["operator"], e["contract"]): e for e in json.loads(call("list", "--json").stdout)}
    assert "sm_90 (1 digests)" in entries["h_aggregate", "tree256"]["proven"]
    assert not any("digests" in text for text in entries["h_aggregate", "ascending"]["proven"])
    assert any("NVIDIA H200" in text for text in entries["h_aggregate", "ascending"]["proven"])  # from the declaration
    assert "tree256" in call("list").stdout


def test_environment_never_raises():
    found = json.loads(call("env", "--json").stdout)
    assert set(found) == {f.name for f in environment.Environment.__dataclass_fields__.values()}
    assert all(isinstance(value, str) and value for value in found.values())
    assert "torch" in call("env").stdout


def test_environment_without_anything(monkeypatch):
    """Every part that cannot be read says so."""
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: 1 / 0)
    for name in ("_gpu", "_arch", "_driver", "_cuda", "_nvrtc", "_cpu_capability", "_commit"):
        monkeypatch.setattr(environment, name, lambda: 1 / 0)
    found = environment.collect.__wrapped__().to_json()
    assert {value for key, value in found.items() if key != "python"} == {environment.ABSENT}


def test_import_of_environment_is_light():
    run = fresh(["-c", "import sys, samebits.environment; print('torch' in sys.modules)"])
    assert run.stdout.strip() == "False"


def test_commit_can_be_stated(monkeypatch):
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc123")
    assert environment._commit() == "abc123"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend.name) for name in registry.names() for backend in registry.spec(name).backends]
)
def test_explain_needs_no_gpu(name, backward, backend):
    for rows in ("0", "1", "100000"):
        result = call("explain", name, "--rows", rows, "--backend", backend, *(["--backward"] if backward else []))
        assert result.exit_code == 0, result.output
        shown = " ".join(result.output.split())
        assert f"backend {backend} (asked for" in shown
        direction = registry.spec(name).direction(backward)
        orders = [
            r
            for r in registry.spec(name).default_contract.reductions
            if r.result in {x.name for x in direction.results}
        ]
        every = registry.spec(name).default_contract.reductions
        assert orders or not every or any(reduction.result.startswith("grad_") for reduction in every)
        for reduction in orders:
            assert " ".join(f"{reduction.result} over {reduction.over}: {reduction.order}".split()) in shown


def test_explain_shows_launch_geometry():
    shown = call("explain", "h_aggregate", "--rows", "1").output
    assert "backend  cuda" in shown and "grid=" in shown and "block=" in shown
    assert "backend  reference" in call("explain", "h_aggregate", "--arch", "cpu").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "nothing"), "no operator named 'nothing'"),
        (("explain", "h_aggregate", "--contract", "x"), "no contract named 'x'"),
        (("explain", "h_aggregate", "--backend", "x"), "no backend named 'x'"),
        (("explain", "h_aggregate", "--backend", "cuda", "--arch", "cpu"), "needs a CUDA tensor"),
        (("explain", "h_aggregate", "--size", "D"), "expected AXIS=NUMBER"),
        (("explain", "h_aggregate", "--size", "Q=3"), "has no axis 'Q'"),
        (("explain", "h_aggregate", "--size", "H=3"), "fixes H = 4"),
        (("explain", "h_aggregate", "--size", "D=0"), "outside 1 .."),
        (("explain", "h_aggregate", "--arch", "x"), "expected one of h200, cpu"),
        (("explain", "h_aggregate", "--rows", "-1"), "at least 0"),
        (("bench",), "name an operator"),
        (("bench", "nothing"), "no operator named 'nothing'"),
        (("bench", "h_aggregate", "--direction", "up"), "expected one of fwd, bwd, fwd+bwd"),
        (("bench", "h_aggregate", "--backend", "x"), "has cuda, triton, reference"),
        (("bench", "h_aggregate", "--size", "H=4"), "only be sized along D"),
        (("bench", "--targets", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("report", "--check", "/nowhere.json"), "/nowhere.json: No such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(words, message):
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_bench_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("bench", "h_aggregate", "--quick")
    assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.output


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert isinstance(call("explain", "nothing").exception, ValueError)


def test_every_command_loads_and_documents_its_options():
    listed = call("--help").output
    for command in cli.COMMANDS:
        if cli.importlib.util.find_spec(command.module) is None:
            continue
        assert command.name in listed
        result = call(command.name, "--help")
        assert result.exit_code == 0, result.output
        function = getattr(cli.importlib.import_module(command.module), command.function)
        assert inspect.getdoc(function)


def test_version():
    from samebits import __version__

    assert call("--version").output.strip() == __version__


def test_a_missing_dependency_is_named(monkeypatch):
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'wheelhouse'", name="wheelhouse")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    result = call("explain", "h_aggregate", "--rows", "3")
    assert result.exit_code == 2 and "'wheelhouse', which is not installed" in result.output


def test_explain_as_json() -> None:
    found = json.loads(call("explain", "h_aggregate", "--backward", "--contract", "tree256", "--json").stdout)
    assert found["shape"] == {"T": 128, "H": 4, "D": 4096}
    assert found["backend"] == "cuda"
    assert len(found["plans"]) > 1
    assert {r["result"] for r in found["contract"]["reductions"]} == {"grad_pre"}
    assert [point.split(":")[0] for point in found["contract"]["rounding"]] == ["grad_residual"]
    assert any("T = 0" in edge for edge in found["contract"]["edges"])


def test_explain_shows_the_whole_declaration() -> None:
    text = " ".join(call("explain", "rmsnorm_residual", "--backward").stdout.split())
    spec = registry.spec("rmsnorm_residual")
    for tensor in (*spec.backward.inputs, *spec.backward.results):
        assert f"{tensor.name} (" in text
        assert " ".join(tensor.doc.split()[:3]) in text
    assert "grad_x (T, D) float32 or bfloat16, as asked" in text
    assert " ".join(spec.edges[0].split()) in text
