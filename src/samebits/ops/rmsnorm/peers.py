"""What ``rmsnorm`` is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def library(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    """PyTorch's fused norm, as ``nn.RMSNorm`` calls it."""
    return (torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps),)


def op_by_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    """FP32 inside, one PyTorch operation per step."""
    wide = x.float()
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype),)


PEERS = (
    Peer("rms_norm", library),
    Peer("torch.compile", op_by_op, compiled=True),
)
