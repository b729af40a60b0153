"""Tensors that are not where an operator can read them are refused, never gathered or re-interpreted."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samebits import registry
from samebits.verify.operators import derived, draw, resolve_sizes


def drawn(spec, direction):
    """Inputs of four rows, every free axis of size 8."""
    sizes = resolve_sizes(spec, {axis: 8 for axis, _, _ in spec.size_limits})
    known = {arg.name: draw(spec, arg, range(4), sizes, 0) for arg in direction.inputs if not arg.derived}
    known |= derived(spec, direction, known, sizes)
    return [known[arg.name] for arg in direction.inputs]


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_refused(mesh):
    """F13, F6. No sharding rule is registered: a wrong one (partial sums, mixed placements) would be silent."""
    for name in registry.names():
        spec = registry.spec(name)
        local = drawn(spec, spec.forward)
        for placement in (Replicate(), Shard(0)):
            placed = [distribute_tensor(t, mesh, [placement]) for t in local]
            with pytest.raises(NotImplementedError, match="sharding strategy"):
                registry.operator(name).forward(*placed)
        upstream = drawn(spec, spec.backward)
        placed_upstream = [distribute_tensor(t, mesh, [Replicate()]) for t in upstream]
        for wanted in itertools.product((True, False), repeat=len(spec.backward.results)):  # F6
            with pytest.raises(NotImplementedError, match="sharding strategy"):
                registry.operator(name).backward(*placed_upstream, wanted=wanted)
        if len(local) > 1:
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                registry.operator(name).forward(placed[0], *local[1:])


def test_tensors_without_storage_are_refused_by_layout():
    x = torch.randn(3, 8).bfloat16().to_sparse()
    with pytest.raises(ValueError, match=r"x has layout torch\.sparse_coo, expected a strided"):
        registry.operator("rmsnorm_residual").forward(x, torch.ones(8))


def test_a_weight_that_mixed_precision_cast_is_refused():
    """F13: what FSDP2's ``cast_forward_inputs`` does to FP32 side inputs, ours or the user's, is an error and not a loss."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor

    for name in registry.names():
        spec = registry.spec(name)
        cast = [_cast_fp_tensor(torch.bfloat16, t) for t in drawn(spec, spec.forward)]
        fp32 = next((arg.name for arg in spec.forward.inputs if arg.dtypes == ("float32",)), None)
        if fp32 is None:  # everything it takes may be BF16, and the result says that it was
            assert registry.operator(name).forward(*cast)[0].dtype == torch.bfloat16
            continue
        with pytest.raises(TypeError, match=rf"{fp32} has dtype torch\.bfloat16, expected torch\.float32"):
            registry.operator(name).forward(*cast)
