"""The benchmark of the patched block, on a machine without a GPU: the calls are real, the times are not judged."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from samebits.bench import results, targets
from samebits.bench.timing import Failure, Sample
from samebits.bench.work import Work
from samebits.models.minimax_h3 import block_bench
from samebits.models.minimax_h3.geometry import OFFICIAL, reduced

SMALL = reduced(16)


def test_ours_and_the_peer_compute_the_same_thing() -> None:
    given = block_bench.subject(30, SMALL, torch.device("cpu"))
    for direction in block_bench.DIRECTIONS:
        ours, theirs = (
            block_bench.timed(name, given, block, given.index, direction).prepare()()
            for name, block in (("ours", given.ours), ("theirs", given.theirs))
        )
        assert len(ours) == len(theirs) == (1 if direction == "fwd" else 15)
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert (one.float() - other.float()).abs().max() < 0.05 * other.float().abs().max()


def test_lines_are_complete_and_name_every_peer(machine: Any, eager_compile: None) -> None:
    lines = list(block_bench.measure(machine, (9,), block_bench.DIRECTIONS, SMALL))
    assert [line["direction"] for line in lines] == ["fwd", "fwd+bwd"]
    for line in lines:
        assert set(results.KEYS) <= line.keys() and line["shape"] == {"T": 9, "H": 16}
        assert line["eager_us"] >= line["eager_us_min"] > 0
        without = {"diffusers without a graph", "diffusers, both without a graph"}
        assert set(line["peers"]) == {"diffusers eager", "torch.compile", "device copy"} | without
        assert not line["peers_skipped"]
    for rows, judged in ((264, 2), (925, 2), (3160, 2), (2048, 0)):
        shaped = [line | {"shape": {"T": rows, "H": 5376}} for line in lines]
        verdicts, _ = targets.judge(shaped)
        assert len(verdicts) == judged and all(verdict.value is not None for verdict in verdicts)
    parameters = sum(p.numel() for p in block_bench.subject(9, SMALL, torch.device("cpu")).theirs.parameters())
    assert lines[0]["bytes"] == 2 * (parameters + 2 * 9 * 16)
    assert lines[1]["bytes"] == 2 * (3 * parameters + 4 * 9 * 16)


def test_the_operations_are_those_of_the_released_block() -> None:
    assert block_bench.operations(1000, OFFICIAL, "fwd") == 2 * (
        1000 * (154_140_672 + 231_211_008) + 2 * 1000**2 * 7168 + 3 * (260_209_152 - 96_768)
    )
    assert block_bench.operations(7, OFFICIAL, "fwd+bwd") == 3 * block_bench.operations(7, OFFICIAL, "fwd")


def test_the_turns_of_two_calls_alternate_and_their_ratio_is_that_of_neighbours() -> None:
    order: list[str] = []

    def work(name: str) -> Work:
        return Work(name, lambda: lambda: order.append(name) or ())

    with mock.patch.object(block_bench, "ROUND_SECONDS", 1e-6):
        found = block_bench.without_a_graph(work("ours"), work("theirs"), torch.device("cpu"))
    turns = [name for name, _ in itertools.groupby(order[6:])]
    assert turns == ["ours", "theirs"] * block_bench.ROUNDS and gc.isenabled()
    assert len(found.ours) == len(found.theirs) == block_bench.ROUNDS and min(found.ours) > 0
    slower = block_bench.Eager((1.0, 10.0, 2.0), (2.0, 30.0, 8.0))  # a machine that is ten times as slow in between
    assert slower.ratio == 3.0


def test_a_failure_of_ours_is_a_line_of_its_own(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(works: Sequence[Work]) -> dict[str, Sample | Failure]:
        return {work.name: Failure("no memory") for work in works}

    monkeypatch.setattr(machine, "measure", fail)
    (line,) = block_bench.measure(machine, (9,), ("fwd",), SMALL, with_compile=False)
    assert line["skipped"] == "no memory" and "us" not in line
