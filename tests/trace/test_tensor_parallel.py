"""A model that torch has made tensor-parallel: the traces of its ranks beside that of one process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel.ranks import on_ranks
from torch import nn
from typer.testing import CliRunner

from samebits import cli
from samebits.verify.drift import Columns, RowMap, column_shards
from samebits.verify.trace import trace

WIDTH, INNER, ROWS = 16, 64, 6


class Mlp(nn.Module):
    """Up to ``down`` everything is a small whole number, of which any order of a sum is exact; ``down`` sums real numbers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, INNER, bias=False),
            nn.ReLU(),
            nn.Linear(INNER, WIDTH, bias=False),
        )
        with torch.no_grad():
            self.up.weight.copy_(torch.randint(-4, 5, (INNER, WIDTH), generator=generator))
            self.down.weight.copy_(torch.randn(WIDTH, INNER, generator=generator))

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def record(model, path):
    x = torch.randint(-4, 5, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1)).float()
    with trace(model, path, tensors=True), torch.no_grad():
        model(x)


def work():
    """On each rank, ``up`` column-parallel and ``down`` row-parallel, as it is and with a fault in rank 1's part of ``up``:
    the files of both traces, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with tempfile.TemporaryDirectory() as folder:
        record(sharded, Path(folder) / "tp.trace")
        if dist.get_rank() == 1:
            with torch.no_grad():
                sharded.up.weight.to_local()[3, 5] += 1
        record(sharded, Path(folder) / "fault.trace")
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``one.trace`` of one process; of each rank a row map and its traces."""
    made = tmp_path_factory.mktemp("tp")
    record(Mlp(), made / "one.trace")
    for rank, files in enumerate(on_ranks(2, work)):
        for name, content in files.items():
            (made / name).write_bytes(content)
        parts = column_shards(["up", "act"], rank, 2).columns
        parts += tuple(Columns(name, -1, rank, 2, "inputs") for name in ("act", "down"))
        RowMap(columns=parts).write(made / f"rank{rank}.json")
    return made


def beside_one_process(folder, name, rank):
    """What ``samebits drift`` prints and writes for a trace of a rank."""
    run, report = f"{name}.rank{rank}.trace", folder / f"{name}{rank}.json"
    words = ["drift", folder / "one.trace", folder / run, "--rows", folder / f"rank{rank}.json", "--json", report]
    words = list(map(str, words))
    result = CliRunner().invoke(cli.build(words), words)
    assert result.exit_code == 1, result.output
    return result.output, json.loads(report.read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_sum_over_ranks_is_the_first_that_differs(folder, rank):
    said, found = beside_one_process(folder, "tp", rank)
    assert (found["b"]["rank"], found["b"]["world_size"], found["a"]["world_size"]) == (rank, 2, 1)
    assert "FIRST DRIFT down (Linear): inputs agree, outputs differ" in said
    assert found["summary"] == {"forward": {"same": 2, "origin": 2}}, (
        "up and act, a part of each, and down and the model"
    )
    assert found["first"]["forward"]["path"] == "down" and f"of {ROWS * WIDTH} elements differ" in said


def test_a_fault_in_one_part_is_found_at_its_rank(folder):
    firsts = [beside_one_process(folder, "fault", rank)[1]["first"]["forward"] for rank in (0, 1)]
    assert [first["path"] for first in firsts] == ["down", "up"]
    assert f"of {ROWS * INNER // 2} elements differ" in firsts[1]["outputs"][0]["detail"]
