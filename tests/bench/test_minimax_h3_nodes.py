"""The benchmark of the fused AdaLN nodes, on a machine without a GPU: the calls are real, the times are not judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from samebits.bench import results, targets
from samebits.bench.timing import Failure, Sample
from samebits.bench.work import Work
from samebits.models.minimax_h3 import nodes_bench
from samebits.models.minimax_h3.geometry import Geometry

SMALL = Geometry(hidden_size=16, time_channels=8, time_hidden=12, time_embed=24)


def test_ours_and_the_peer_compute_the_same_thing() -> None:
    for node in nodes_bench.nodes(50, SMALL, torch.device("cpu")):
        for direction in nodes_bench.DIRECTIONS:
            ours, theirs = (
                nodes_bench.timed(name, node, function, node.index, direction).prepare()()
                for name, function in (("ours", node.ours), ("theirs", node.theirs))
            )
            assert len(ours) == len(theirs) > 0
            for one, other in zip(ours, theirs, strict=True):
                assert one.shape == other.shape and one.dtype == other.dtype
                scale = other.float().abs().max()
                assert (one.float() - other.float()).abs().max() < 0.05 * scale, (node.name, direction)


def test_lines_are_complete_and_name_every_peer(machine: Any, eager_compile: None) -> None:
    lines = list(nodes_bench.measure(machine, (9,), nodes_bench.DIRECTIONS, SMALL))
    assert [(line["contract"], line["direction"]) for line in lines] == [
        (name, direction) for name in ("adaln_modulation", "final_adaln_out") for direction in nodes_bench.DIRECTIONS
    ]
    for line in lines:
        assert set(results.KEYS) <= line.keys() and line["shape"] == {"T": 9, "H": 16}
        assert set(line["peers"]) == {"diffusers eager", "torch.compile", "device copy"} and not line["peers_skipped"]
    verdicts, unheard = targets.judge(lines)
    assert not verdicts and len(unheard) == 10, "another width has no target"
    verdicts, _ = targets.judge([line | {"shape": {"T": 9, "H": 5376}} for line in lines])
    assert len(verdicts) == 6 and all(verdict.value is not None for verdict in verdicts)
    table, rows = 2 * (18 * 16 * 24 + 18 * 16), 6 * 2 * 9 * 16
    assert lines[0]["bytes"] == 4 * 3 * 24 + table + rows
    assert lines[1]["bytes"] == 2 * (4 * 3 * 24 + table) + rows
    assert lines[2]["bytes"] == lines[0]["bytes"] + lines[1]["bytes"]


def test_a_failure_of_ours_is_a_line_of_its_own(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(works: Sequence[Work]) -> dict[str, Sample | Failure]:
        return {work.name: Failure("no memory") for work in works}

    monkeypatch.setattr(machine, "measure", fail)
    (line, _) = nodes_bench.measure(machine, (9,), ("fwd",), SMALL)
    assert line["skipped"] == "no memory" and "us" not in line
