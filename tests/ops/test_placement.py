"""Tensors that are not where an operator can read them are refused, never gathered or re-interpreted."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samebits import registry
from samebits.verify.operators import draw, resolve_sizes


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_refused(mesh):
    """No sharding rule is registered: a wrong one (partial sums, mixed placements) would be silent."""
    for name in registry.names():
        spec = registry.spec(name)
        sizes = resolve_sizes(spec, {axis: 8 for axis, _, _ in spec.size_limits})
        local = [draw(spec, arg, range(4), sizes, 0) for arg in spec.forward.inputs]
        for placement in (Replicate(), Shard(0)):
            placed = [distribute_tensor(t, mesh, [placement]) for t in local]
            with pytest.raises(NotImplementedError, match="sharding strategy"):
                registry.operator(name).forward(*placed)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            registry.operator(name).forward(placed[0], *local[1:])


def test_tensors_without_storage_are_refused_by_layout():
    x = torch.randn(3, 8).bfloat16().to_sparse()
    with pytest.raises(ValueError, match=r"x has layout torch\.sparse_coo, expected a strided"):
        registry.operator("rmsnorm_residual").forward(x, torch.ones(8))
