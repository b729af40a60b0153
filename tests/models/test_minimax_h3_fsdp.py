"""The patched model with the parameters of FSDP2: the bits that it has without, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samebits
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import subject


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _model() -> nn.Module:
    return subject.to_bfloat16(subject.build(num_layers=1))


def _run(model: nn.Module) -> list[torch.Tensor]:
    made = model(**subject.subject().inputs)
    torch.stack([out.float().square().sum() for out in made]).sum().backward()
    return list(made)


def test_a_sharded_model_has_the_bits_of_a_whole_one(mesh):
    from torch.distributed.fsdp import fully_shard

    whole, sharded = _model(), _model()
    for model in (whole, sharded):
        samebits.patch(model)
    parts = (*sharded.transformer_blocks, *sharded.token_refiner.refiner_blocks)
    for part in parts:
        fully_shard(part, mesh=mesh)
    assert all(map(same_bits, _run(sharded), _run(whole)))
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    shards = 0
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            shards += 1
            gradient = gradient.full_tensor()
        assert gradient is not None and same_bits(gradient, expected[name]), name
    assert shards == 22, "twelve of a block, ten of a block of the refiner"


def test_the_patch_comes_first(mesh):
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model.transformer_blocks[0], mesh=mesh)
    with pytest.raises(TypeError, match="fully_shard after the patch"):
        samebits.patch(model)
