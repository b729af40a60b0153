"""The measurement of the overhead runs, and would tell a run that the trace changed."""

from __future__ import annotations

import itertools
import json
from importlib import metadata

import pytest
from drift.models import Net, batch

from samebits.cli.errors import UserError
from samebits.verify.trace import overhead
from samebits.verify.trace.overhead import main, measure


def test_measure():
    model, x = Net(), batch()
    found = measure(lambda: model(x), model, rounds=2, gradients=False)
    assert found.unchanged and found.rounds == 2 and found.calls == 9
    assert found.plain_ms > 0 and found.traced_ms > 0 and found.ratio > 0
    sizes = 4 * 4 * (8 + 8 + 8 + 16 + 16 + 8 + 8 + 8)  # per block: norm, up, down, the block
    assert found.digested_bytes == 2 * sizes + 4 * 4 * (8 + 8)
    # Read: what norm, up, relu, down and the block return. The model's input was read in the run before.
    assert found.read_bytes == 2 * 4 * 4 * (8 + 16 + 16 + 8 + 8)
    again = measure(lambda: model(x), model, rounds=1, gradients=False, reuse=False)
    assert again.read_bytes == again.digested_bytes == found.digested_bytes


def test_the_ratio_is_that_of_neighbours(monkeypatch):
    """A machine that is slower for a while is so for both."""
    model, x = Net(), batch()
    seconds = iter([1, 2, 10, 21, 1, 2.2])
    monkeypatch.setattr(overhead, "_timed", lambda run, device: (next(seconds), run()))
    found = overhead.measure(lambda: model(x), model, rounds=3, gradients=False)
    assert (found.plain_ms, found.traced_ms, found.ratio) == (1000, 2200, 2.1)


def test_a_changed_result_is_noticed():
    model, x, count = Net(), batch(), itertools.count()
    assert not measure(lambda: model(x) + next(count), model, rounds=1).unchanged


def test_the_program_prints_json(capsys):
    main(["--device", "cpu", "--rounds", "1", "--sequence", "4", "--batch", "1", "--contracts", "published"])
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "samebits-trace-overhead" and found["unchanged"] and found["calls"] > 20
    assert found["environment"]["torch"] == metadata.version("torch")


def test_the_block_of_minimax_h3_forward_and_backward(capsys, tmp_path):
    out = tmp_path / "overhead.jsonl"
    main([
        *("--model", "minimax-h3", "--small", "--device", "cpu", "--sequence", "5", "6", "--backward"),
        *("--rounds", "1", "--rows", "2", "--out", str(out)),
    ])  # fmt: skip
    assert capsys.readouterr().out == out.read_text()
    for rows, line in zip((5, 6), out.read_text().splitlines(), strict=True):
        found = json.loads(line)
        assert f"{rows} rows, forward and backward" in found["model"] and found["unchanged"] and found["calls"] > 60
        assert 0 < found["read_bytes"] < found["digested_bytes"] / 2


def test_with_and_without_the_modules_that_run_for_the_trace_alone(capsys):
    """In a patched block the norms and the projection's linear are a part of something else."""
    calls = []
    for more in (["--passed-over"], []):
        main(["--model", "minimax-h3", "--small", "--device", "cpu", "--sequence", "5", "--rounds", "1", *more])
        found = json.loads(capsys.readouterr().out)
        assert found["unchanged"] and found["options"]["passed_over"] is bool(more)
        calls.append(found["calls"])
    assert calls[0] - calls[1] == 2 * 5, "each of five modules, and its operator"


def test_a_backward_that_there_is_not_is_said():
    with pytest.raises(UserError, match="no gradient"):
        main(["--device", "cpu", "--sequence", "4", "--batch", "1", "--contracts", "published", "--backward"])
