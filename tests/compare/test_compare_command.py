"""``samebits compare``: every operator on a CPU, exit codes, the figure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from samebits import cli, registry
from samebits.bench import peers
from samebits.compare import figure, process, scale, show
from samebits.compare.run import run

TINY = scale.Scale(
    alone=(2, 5), full=9, sweep=9, judged=5, timed=(5,), seeds=(3,), repeats=2, compile=False, seconds=0.0
)
PLANTED = Path(__file__).with_name("planted.py")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(scale, "default", lambda device, quick: dataclasses.replace(TINY, widest=16))


def call(*words):
    words = ("compare", *map(str, words))
    return CliRunner().invoke(cli.build(words), list(words))


def some(tmp_path, *names):
    """A file with these of the planted peers."""
    path = tmp_path / "some.py"
    path.write_text(f"from compare.planted import PEERS\nPEERS = tuple(p for p in PEERS if p.name in {names!r})\n")
    return path


@pytest.mark.parametrize("name", registry.names())
def test_every_operator(name, tiny, tmp_path):
    """Ours keeps its promises, and every declared peer and mode has an entry with a verdict or a reason."""
    out = tmp_path / "report.json"
    result = call(name, "--device", "cpu", "--quick", "--out", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    entries = {entry["name"]: entry for entry in report["contestants"]}
    declared = peers.of(name)
    expected = [peer.name for peer in declared] + [f"{p.name}, {mode.name}" for p in declared for mode in p.modes]
    assert sorted(entries) == sorted(["samebits", *expected])
    mine = entries["samebits"]
    assert mine["invariance"]["batch_invariant"] and mine["invariance"]["repeatable"]
    spec = registry.spec(name)
    public = [r.name for r in spec.forward.results if not r.hidden] + [r.name for r in spec.backward.results]
    assert set(mine["accuracy"]) == set(public)
    whole = {r.name for r in spec.forward.results if not r.hidden} | {f"grad_{leaf}" for leaf in spec.learned}
    for peer in declared:
        if entries[peer.name]["status"] == "compared" and peer.outputs is None and peer.gradients is None:
            assert set(entries[peer.name]["equality"]["tensors"]) == whole, peer.name
    assert [time["direction"] for time in mine["latency"]] == ["fwd", "bwd", "fwd+bwd"]
    for entry in entries.values():
        if entry["status"] == "compared":
            assert entry is mine or entry["equality"]["tensors"]
            assert entry["latency"] and not any("failed" in time for time in entry["latency"]), entry["latency"]
        else:
            assert entry["status"] in ("unavailable", "left out") and entry["reason"] and entry["invariance"] is None
            assert f"{entry['name']}: {entry['status']}: {entry['reason']}" in show.notes(report)


def test_a_figure(tiny, tmp_path):
    out, png = tmp_path / "report.json", tmp_path / "figure.png"
    words = ("--peers", some(tmp_path, "clean", "other bits", "raises", "needs a GPU"), "--out", out, "--figure", png)
    assert call("rmsnorm_residual", "--device", "cpu", *words).exit_code == 1
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    report = json.loads(out.read_text())
    drawn = figure.picture(report)
    matrix, bars = drawn.axes
    words = [text.get_text() for text in matrix.texts]
    cells = [v for entry in show.ran(report) if entry["status"] == "compared" for v in show.verdicts(entry).values()]
    assert [word for word in words if len(word) <= 3] == [{True: "yes", False: "no", None: "-"}[v] for v in cells]
    assert "failed: ArithmeticError: planted" in words
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["samebits", "clean", "other bits", "raises"]
    assert len(bars.patches) == 9
    assert "needs a GPU" in drawn.get_supxlabel()


def test_a_clean_peer_is_zero_and_a_difference_is_a_finding(tiny, tmp_path):
    words = ("rmsnorm_residual", "--device", "cpu", "--no-times", "--size", "D=8")
    result = call(*words, "--peers", some(tmp_path, "clean", "other bits", "24 rows"))
    assert result.exit_code == 0, result.output
    assert "other bits: y has other bits than ours" in result.output


@pytest.mark.parametrize(
    ("names", "words"),
    [(("clean", "raises"), "raises failed: ArithmeticError: planted"), (("needs a GPU",), "no peer could be compared")],
)
def test_a_comparison_that_was_not_made_is_one(tiny, tmp_path, names, words):
    result = call(
        "rmsnorm_residual", "--device", "cpu", "--no-times", "--size", "D=8", "--peers", some(tmp_path, *names)
    )
    assert result.exit_code == 1 and words in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "no operator named 'nothing'"),
        (("h_aggregate", "--contract", "slow"), "no contract named 'slow'"),
        (("h_aggregate", "--backend", "metal"), "h_aggregate has cuda, triton, reference"),
        (("h_aggregate", "--backend", "cuda", "--device", "cpu"), "'cuda' needs a CUDA tensor"),
        (("h_aggregate", "--device", "tpu"), "expected cpu, cuda or cuda:N"),
        (("h_aggregate", "--device", "cuda:77"), "no such GPU"),
        (("h_aggregate", "--size", "D"), "AXIS=NUMBER"),
        (("h_aggregate", "--size", "Q=3"), "no axis 'Q'"),
        (("h_aggregate", "--rows", "0"), "at least 1"),
        (("h_aggregate", "--out", "/no/such/folder/x.json"), "does not exist"),
        (("h_aggregate", "--peers", "nowhere.py"), "no such file of peers"),
        (("h_aggregate", "--peers", __file__), "expected PEERS"),
        (("h_aggregate", "--peers", PLANTED), "known are ['hidden']"),
        (("h_aggregate", "--nonsense",), "No such option"),
    ],
)  # fmt: skip
def test_wrong_use_is_two(words, message):
    if "--device" not in words:
        words = (*words, "--device", "cpu")
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_compiled_peer_needs_a_compiler(tmp_path, monkeypatch):
    from samebits.cli.compare import requested

    few = dataclasses.replace(TINY, alone=(2,), full=2, sweep=2, judged=2)  # every new size may be compiled anew
    monkeypatch.setattr(scale, "default", lambda device, quick: few)
    path = some(tmp_path, "compiled")
    request = requested("rmsnorm_residual", None, None, "cpu", ["D=8"], [], True, True, False, path)
    monkeypatch.setattr(process.shutil, "which", lambda name: None)
    (peer,) = request.peers()
    assert process.why_not(peer, request) == ("unavailable", process.NO_COMPILER)
    monkeypatch.setattr(process.shutil, "which", lambda name: f"/usr/bin/{name}")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend="aot_eager", **options))
    found = run(request)["contestants"][1]
    assert found["status"] == "compared" and found["compiled"], found["reason"]
    assert found["equality"]["same"] is True and found["invariance"]["batch_invariant"]


def test_a_preset_environment_is_told(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1")
    words = ("rmsnorm_residual", "--device", "cpu", "--no-times", "--size", "D=8", "--peers", some(tmp_path, "clean"))
    assert "the environment has CUBLASLT_WORKSPACE_SIZE=1" in call(*words).output
