"""Parameters that FSDP2 has spread over two ranks, and checkpoints: operators have the bits of one process without either."""

from __future__ import annotations

import torch
from parallel.ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.exact.compare import same_bits

WIDTH, HEADS, CHANNELS = 24, 1, 64


class Layer(nn.Module):
    """The matrix, attention and head operators of a transformer block, with parameters of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 6 * HEADS * CHANNELS, bias=False)
        self.head_norm = nn.RMSNorm(CHANNELS)
        self.down = nn.Linear(HEADS * CHANNELS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: Tensor) -> Tensor:
        normed = samebits.rmsnorm(x, self.norm.weight, eps=1e-5)
        heads = samebits.swiglu(samebits.linear(normed, self.up.weight)).unflatten(-1, (3 * HEADS, CHANNELS))
        q, k, v = heads.split(HEADS, -2)
        q, k = (samebits.qk_rmsnorm(t, self.head_norm.weight, eps=1e-5) for t in (q, k))
        out, _ = samebits.attention(q, k, v)
        return samebits.linear(out.flatten(-2), self.down.weight, self.down.bias)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).bfloat16()


def _run(model: nn.Module) -> Tensor:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    made: Tensor = model(x)
    made.float().square().sum().backward()
    return made


def _work() -> tuple[bool, dict[str, bool]]:
    """On each rank: whether the output is that of one process, and each gradient."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole, sharded, mesh = _model(), _model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh)
    same = same_bits(_run(sharded), _run(whole))
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert None not in expected.values()
    return same, {n: same_bits(p.grad.full_tensor(), expected[n]) for n, p in sharded.named_parameters()}


def test_sharded_and_checkpointed_operators_have_the_bits_of_one_process():
    """F13. The mean over ranks of one gradient twice is that gradient."""
    for output, gradients in on_ranks(2, _work):
        assert output
        assert len(gradients) == 10 and all(gradients.values()), gradients
