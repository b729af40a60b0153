"""What ``rmsnorm_residual`` is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def op_by_op(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """FP32 inside, one PyTorch operation per step, then the fork of the residual stream."""
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * rstd * gamma).to(x.dtype), x.clone()


def library(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """PyTorch's fused norm. It has a fused kernel only where gamma has the dtype of x, so gamma arrives in BF16."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, eps), x.clone()


PEERS = (
    Peer("pytorch eager", op_by_op),
    Peer("torch.compile", op_by_op, compiled=True),
    Peer("rms_norm + clone", library, cast=(("gamma", "bfloat16"),)),
)
