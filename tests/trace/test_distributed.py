"""Each rank writes its own trace; what the modules of a sharded model see is what those of a whole one see."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from parallel.ranks import on_ranks
from torch import nn

from samebits.verify.drift import drift
from samebits.verify.trace import read, trace


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def inputs(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def record(wrapped, path, rank):
    with trace(wrapped, path) as recording:
        wrapped(inputs(rank)).sum().backward()
    return recording.trace


def work():
    """On each of two ranks: under DDP and under FSDP2. Returns the texts of the files, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    sharded, mesh = model(), init_device_mesh("cpu", (2,))
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=mesh)
    with tempfile.TemporaryDirectory() as folder:
        record(nn.parallel.DistributedDataParallel(model()), Path(folder) / "ddp.trace", rank)
        record(sharded, Path(folder) / "fsdp.trace", rank)
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


def test_ranks_write_files_of_their_own_that_agree_with_a_single_process(tmp_path):
    found = on_ranks(2, work)
    for rank, files in enumerate(found):
        assert sorted(files) == [f"ddp.rank{rank}.trace", f"fsdp.rank{rank}.trace"]
        alone = record(model(), None, rank)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            head = json.loads(text.splitlines()[0])
            assert (head["rank"], head["world_size"]) == (rank, 2)
            result = drift(alone, read(tmp_path / name))
            assert result.counts("forward") == {"same": 4}
            assert not result.differing_parameters and not result.differing_inputs
            calls = [j for j in result.phases["backward"] if j.event.kind == "module"]
            assert {j.judgement for j in calls} == {"same"} and len(calls) == 4
        local = drift(alone, read(tmp_path / f"ddp.rank{rank}.trace")).phases["backward"]
        assert {j.judgement for j in local if j.event.kind == "gradient"} == {"same"}  # before they are reduced
    sides = drift(tmp_path / "ddp.rank0.trace", tmp_path / "ddp.rank1.trace")
    assert [j.name for j in sides.differing_inputs] == ["(model) (Sequential)"] and not sides.differing_parameters
    shards = read(tmp_path / "fsdp.rank1.trace")
    gradients = [e.outputs[0] for e in shards.phase("backward") if e.kind == "gradient"]
    assert {r.shape for r in gradients} == {(8, 8), (8,), (4, 16), (4,)} and all(r.is_shard for r in gradients)
