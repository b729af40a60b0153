"""``samebits compare attention`` on a CPU: the form of the report, and that each verdict can be a no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from samebits import cli
from samebits.compare import figure, show
from samebits.compare.scale import Scale
from samebits.sequence_ops.attention import comparison
from samebits.sequence_ops.attention.peers import PEERS
from samebits.sequence_ops.attention.subject import Ours
from samebits.sequence_ops.attention.targets import CUDNN, FLASH, FLASH_DETERMINISTIC

TINY = Scale(alone=(3,), full=3, sweep=3, judged=3, timed=(3,), seeds=(3,), repeats=2, seconds=0.0)
MINE = """
from samebits.bench.peers import Peer
from samebits.sequence_ops.attention import golden

def leaning(q, k, v):
    out = golden.forward(q, k, v, False, q.shape[-1] ** -0.5)[0].to(q.dtype)
    return out * (1 + 0.0078125 * ({where}))

PEERS = (Peer("leaning", leaning),)
"""


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SCALES", dict.fromkeys(comparison.SCALES, TINY))


def call(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "report.json"
    line = ["compare", "attention", "--device", "cpu", "--json", str(out), *words]
    done = CliRunner().invoke(cli.build(line), line)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(out.read_text()) if done.exit_code < 2 else {"error": done.output}


def test_every_peer_has_an_entry(tmp_path: Path) -> None:
    code, report = call(tmp_path, "--contract", "fa2")
    assert code == 0, report["failures"]
    assert (report["op"], report["contract"], report["backend"]) == ("attention", "fa2", "reference")
    assert report["sizes"] == {"H": 2, "H_kv": 2, "D": 64}
    entries = {entry["name"]: entry for entry in report["contestants"]}
    assert set(entries) == {"samebits", *PEERS}
    assert entries[CUDNN]["status"] == entries["efficient"]["status"] == "unavailable"
    assert list(show.verdicts(entries["samebits"]).values()) == [None, None, True, True, True, True]
    for name in (FLASH, FLASH_DETERMINISTIC, "math"):
        assert entries[name]["status"] == "compared"
        assert set(entries[name]["equality"]["tensors"]) == {"out", "grad_q", "grad_k", "grad_v"}
        assert entries[name]["accuracy"]["out"]["tolerance_used"] < 1
        assert [(t["direction"], t["rows"]) for t in entries[name]["latency"]] == [
            ("fwd", 3),
            ("bwd", 3),
            ("fwd+bwd", 3),
        ]
        assert all(t["ratio"] > 0 for t in entries[name]["latency"])
    show.table_of(report)
    assert any("cuDNN: unavailable" in note for note in show.notes(report))
    figure.draw(report, tmp_path / "compare.png")


@pytest.mark.parametrize(
    ("where", "broken"),
    [("q.shape[1] == 1", "alone"), ("q.shape[2] == 1", "parts"), ("q.shape[0] == 2 and q.shape[1] == 2", "sizes")],
)
def test_a_peer_that_leans_on_its_surroundings_is_found(
    where: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from samebits.sequence_ops.attention import checking

    monkeypatch.setattr(checking, "FEW", (1, 2))
    (tmp_path / "mine.py").write_text(MINE.format(where=where))
    code, report = call(tmp_path, "--peers", str(tmp_path / "mine.py"), "--no-times")
    assert code == 0, report["failures"]
    verdicts = show.verdicts(report["contestants"][1])
    assert {name for name in ("alone", "parts", "sizes", "repeats") if not verdicts[name]} == {broken}


def test_ours_must_keep_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ours.forward

    def leaning(self: Ours, given: Any) -> dict[str, Tensor]:
        found = right(self, given)
        return found | {"out": found["out"] * (1.5 if given.q.shape[1] == 1 else 1.0)}

    monkeypatch.setattr(Ours, "forward", leaning)
    code, report = call(tmp_path, "--no-times")
    assert code == 1
    assert any("samebits is not batch-invariant" in text for text in report["failures"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "T=3"), "H, H_kv and D"),
        (("--size", "D=32"), "D must be 64 or 128"),
        (("--contract", "x"), "no contract named"),
        (("--backend", "x"), "has cuda, triton, reference"),
        (("--backend", "cuda"), "needs a CUDA tensor"),
    ],
)
def test_wrong_use_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, report = call(tmp_path, *words)
    assert code == 2
    assert message in report["error"]
