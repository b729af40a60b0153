"""The benchmark of the patched block, on a machine without a GPU: the calls are real, the times are not judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        assert set(results.KEYS) <= line.keys() and line["shape"] == {"T": 9, "H": 16} and line["eager_us"] > 0
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


def test_a_failure_of_ours_is_a_line_of_its_own(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(works: Sequence[Work]) -> dict[str, Sample | Failure]:
        return {work.name: Failure("no memory") for work in works}

    monkeypatch.setattr(machine, "measure", fail)
    (line,) = block_bench.measure(machine, (9,), ("fwd",), SMALL, with_compile=False)
    assert line["skipped"] == "no memory" and "us" not in line
