"""What ``mhc_pre`` is compared with: the hyper-connection as a model file writes it, one PyTorch operation per step."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench import modes, tile_kernels
from samebits.bench.peers import Peer

_EPS = 1e-6


def controller_logits(residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The streams are normalised before the projection; everything is FP32, and the projection the library's own."""
    x = residual.flatten(-2).float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear(x, weight) * gain + bias


def collapse(pre: Tensor, residual: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * residual.float()).sum(-2).to(residual.dtype)


def op_by_op(residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Semantics of transformers' ``DeepseekV4HyperConnection``."""
    logits = controller_logits(residual, weight, gain, bias, eps)
    pre, post, comb = logits[..., :4], logits[..., 4:8], logits[..., 8:]
    matrix = comb.reshape(*comb.shape[:-1], 4, 4).softmax(-1) + _EPS
    matrix = matrix / (matrix.sum(-2, keepdim=True) + _EPS)
    for _ in range(19):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + _EPS)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + _EPS)
    return collapse(pre.sigmoid() + _EPS, residual), 2 * post.sigmoid(), matrix


PEERS = (
    Peer("pytorch eager", op_by_op, modes=modes.FP32_GEMM),
    Peer("torch.compile", op_by_op, compiled=True),
    Peer("TileKernels", tile_kernels.pre, needs=tile_kernels.MODULES, cuda=True),
)
