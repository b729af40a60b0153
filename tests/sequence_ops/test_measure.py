"""``samebits bench attention`` without a GPU: what is asked, what a line says, and that its judgements can fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from samebits import cli, environment
from samebits.bench import results, show, targets, timing
from samebits.bench.case import DIRECTIONS, Case
from samebits.bench.run import Settings
from samebits.bench.timing import Failure, Sample
from samebits.bench.work import Work
from samebits.sequence_ops.attention import evidence, measure
from samebits.sequence_ops.attention.peers import PEERS
from samebits.sequence_ops.attention.subject import Inputs, Ours
from samebits.sequence_ops.attention.targets import CUDNN, FLASH, FLASH_DETERMINISTIC, TARGETS

CPU = torch.device("cpu")
SMALL = (("H", 2), ("D", 64))


class Machine:
    """Runs each work once and says that it took 100 us, a library 150; cuDNN is not there."""

    device, copy_gbps, launch_floor_us = CPU, 4000.0, 2.5

    def measure(self, works: Sequence[Work]) -> dict[str, Sample | Failure]:
        found: dict[str, Sample | Failure] = {}
        for work in works:
            us = 100.0 if work.keep else 150.0
            try:
                outputs = tuple(work.prepare()())
                found[work.name] = Sample(us, us, us, 15, "graph", 5.0, 0, outputs if work.keep else ())
            except RuntimeError as error:
                found[work.name] = Failure(str(error).splitlines()[0])
        return found

    def free_bytes(self) -> int:
        return 1 << 34

    def release(self) -> None:
        pass


def measured(direction: str, *contracts: str, rows: int = 20) -> list[dict[str, object]]:
    settings = Settings(contracts or ("cudnn",), ("reference",))
    case = Case("attention", direction, rows, SMALL)  # type: ignore[arg-type]
    return list(measure.run([case], settings, Machine(), environment.collect()))


def test_cases_are_those_of_the_targets_or_all() -> None:
    quick = measure.cases(True, DIRECTIONS, (), {})
    assert {(c.direction, c.rows) for c in quick} == {(t.direction, t.rows[0]) for t in TARGETS}
    assert all(c.grads == "model" for c in quick)
    assert measure.cases(True, ("fwd",), (925,), {}) == (Case("attention", "fwd", 925, (("H", 56), ("D", 128))),)
    assert len(measure.cases(False, DIRECTIONS, (), {})) == 3 * len(measure.ROWS)
    assert measure.cases(False, ("bwd",), (7,), {"D": 64})[0].shape() == {"T": 7, "H": 56, "D": 64}
    with pytest.raises(ValueError, match="sized along H, D"):
        measure.cases(False, DIRECTIONS, (), {"K": 3})


def test_lines_have_the_keys_of_every_result(tmp_path: Path) -> None:
    lines = [one for direction in DIRECTIONS for one in measured(direction, "cudnn", "fa2", rows=9)]
    assert len(lines) == 6
    assert all(one["bits_checked"] for one in lines), [one["bits"] for one in lines]
    results.write(tmp_path / "attention.jsonl", lines)
    assert results.read([tmp_path / "attention.jsonl"]) == json.loads(json.dumps(lines))
    forward, backward, both = lines[0], lines[2], lines[4]
    assert forward["tflops"] == round(4 * 81 * 2 * 64 / 100e-6 * 1e-12, 1)
    assert forward["bytes"] == 4 * 2 * 9 * 2 * 64 + 4 * 9 * 2
    assert both["bytes"] == forward["bytes"] + backward["bytes"]
    assert forward["peers"][FLASH]["ratio"] == 1.5
    assert set(backward["peers"]) == {FLASH, FLASH_DETERMINISTIC}
    assert set(forward["peers_skipped"]) == {CUDNN, "efficient"}
    assert set(forward["peers"][FLASH]["invariant"]) == set(forward["invariant"])
    assert "same_bits_as" not in forward, "cuDNN is not here"
    assert list(lines[1]["same_bits_as"]) == [FLASH]
    for same, words in ((True, ": the bits of FlashAttention-2"), (False, ": NOT the bits of FlashAttention-2")):
        assert any(words in note for note in show.notes([lines[1] | {"same_bits_as": {FLASH: same}}]))
    leaning = {FLASH: forward["peers"][FLASH] | {"invariant": {"again": True, "half of the heads": False}}}
    assert any("other bits with: half of the heads" in note for note in show.notes([forward | {"peers": leaning}]))
    show.measured(lines)


def test_wrong_bits_and_leaning_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure.expected
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):

        def one_bit(case: Case, given: Inputs, contract: str, name: str = name) -> dict[str, Tensor]:
            truth = right(case, given, contract)
            return truth | {name: truth[name] * 1.0078125}

        monkeypatch.setattr(measure, "expected", one_bit)
        (line,) = measured("fwd+bwd", rows=5)
        assert not line["bits_checked"]
        assert str(line["bits"]).startswith(f"{name} of the sample differs")
    monkeypatch.undo()
    monkeypatch.setattr(Ours, "out", lambda self, q, k, v: PEERS["math"](q, k, v) + q.shape[1])
    (line,) = measured("fwd", rows=5)
    assert not line["bits_checked"]
    assert "rows change: last 1 queries" in str(line["bits"])


def test_targets_are_judged() -> None:
    line = measured("fwd", rows=5)[0] | {"backend": "cuda", "shape": {"T": 3160, "H": 56, "D": 128}}
    for ratio, met in ((1.5, True), (1.2, False)):
        verdicts, unheard = targets.judge([line | {"peers": {FLASH: {"us": 1.0, "ratio": ratio}}}])
        assert [(v.target.text, v.met) for v in verdicts] == [(f">= 1.3 x {FLASH}", met)]
        assert len(unheard) == len(TARGETS) - 1
        show.judged(verdicts, unheard)


def test_deterministic_algorithms_are_asked_for_and_left_again() -> None:
    given = measure.drawn(Case("attention", "bwd", 5, SMALL), CPU)
    for name, expected in ((FLASH, False), (FLASH_DETERMINISTIC, True)):
        seen: list[bool] = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, q: Tensor) -> Tensor:
                return q.clone()

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:
                seen.append(torch.are_deterministic_algorithms_enabled())  # noqa: B023
                return grad

        peer = measure.peer_of(
            Case("attention", "bwd", 5, SMALL), given, name, lambda q, k, v: PEERS["math"](Watched.apply(q), k, v)
        )
        run = peer.prepare()
        run()
        assert seen == [expected] * 2
        assert not torch.are_deterministic_algorithms_enabled()


def drawn(length: int) -> list[Tensor]:
    one = measure.drawn(Case("attention", "fwd", length, SMALL), CPU)
    return [one.q, one.k, one.v]


def test_ours_is_invariant_and_what_leans_is_found() -> None:
    ours = Ours("cudnn", None)
    found = evidence.invariance(ours.out, *drawn(40))
    assert len(found) == 5
    assert all(found.values()), found

    def leaning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PEERS["math"](q, k, v) * 0 + q.shape[0] + q.shape[1] + 16 * q.shape[2]

    found = evidence.invariance(leaning, *drawn(40))
    assert found == {name: name == "again" for name in found}


def test_a_peer_takes_our_layout() -> None:
    q, k, v = drawn(20)
    theirs = PEERS["math"](q, k[:, :, :1], v[:, :, :1])
    ours = Ours("fa2", None).out(q, k[:, :, :1], v[:, :, :1])
    assert theirs.shape == ours.shape
    assert (theirs.float() - ours.float()).abs().max() < 2e-2


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def call(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.build(["bench"]), ["bench", "attention", *words])
        return done.exit_code, done.output

    assert "needs an NVIDIA GPU" in call("--quick")[1]
    assert call("--size", "K=3")[0] == call("--backend", "eager")[0] == call("--contract", "fast")[0] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "CudaMachine", Machine)
    out = tmp_path / "attention.jsonl"
    small = ("--rows", "5", "--size", "H=2", "--size", "D=64", "--direction", "fwd", "--backend", "reference")
    code, shown = call(*small, "--out", str(out))
    assert code == 0, shown
    assert [line["contract"] for line in results.read([out])] == ["cudnn", "fa2"]
    assert call("--targets", str(out))[0] == 1, "no target was measured"
