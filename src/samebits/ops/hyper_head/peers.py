"""What ``hyper_head`` is compared with: the head's collapse as a model file writes it, one PyTorch operation per step."""

from __future__ import annotations

from torch import Tensor

from samebits.bench import modes, tile_kernels
from samebits.bench.peers import Peer
from samebits.ops.mhc_pre.peers import collapse, controller_logits


def op_by_op(residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor]:
    """Semantics of transformers' ``DeepseekV4HyperHead``."""
    pre = controller_logits(residual, weight, gain, bias, eps).sigmoid() + 1e-6
    return (collapse(pre, residual),)


PEERS = (
    Peer("pytorch eager", op_by_op, modes=modes.FP32_GEMM),
    Peer("torch.compile", op_by_op, compiled=True),
    Peer("TileKernels", tile_kernels.head, needs=tile_kernels.MODULES, cuda=True),
)
