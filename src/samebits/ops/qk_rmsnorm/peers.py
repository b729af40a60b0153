"""What ``qk_rmsnorm`` is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def library(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    """PyTorch's fused norm, as ``nn.RMSNorm`` calls it on each head."""
    return (torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps),)


PEERS = (
    Peer("rms_norm", library),
    Peer("torch.compile", library, compiled=True),
)
