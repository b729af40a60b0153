"""The measurement of the overhead runs, and would tell a run that the trace changed."""

from __future__ import annotations

import itertools
import json

import torch
from drift.models import Net, batch

from samebits.verify.trace.overhead import main, measure


def test_measure():
    model, x = Net(), batch()
    found = measure(lambda: model(x), model, rounds=2, gradients=False)
    assert found.unchanged and found.rounds == 2 and found.calls == 9
    assert found.plain_ms > 0 and found.traced_ms > 0 and found.ratio == found.traced_ms / found.plain_ms
    sizes = 4 * 4 * (8 + 8 + 8 + 16 + 16 + 8 + 8 + 8)  # per block: norm, up, down, the block
    assert found.digested_bytes == 2 * sizes + 4 * 4 * (8 + 8)


def test_a_changed_result_is_noticed():
    model, x, count = Net(), batch(), itertools.count()
    assert not measure(lambda: model(x) + next(count), model, rounds=1).unchanged


def test_the_program_prints_json(capsys):
    main(["--device", "cpu", "--rounds", "1", "--sequence", "4", "--batch", "1", "--contracts", "published"])
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "samebits-trace-overhead" and found["unchanged"] and found["calls"] > 20
    assert found["environment"]["torch"] == torch.__version__
