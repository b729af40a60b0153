"""What ``rmsnorm_modulated`` is compared with: the model's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def diffusers(x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float) -> tuple[Tensor]:
    """``nn.RMSNorm`` and the modulation as diffusers' MiniMaxH3TransformerBlock writes it, operation by operation."""
    n = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return (n * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index),)


PEERS = (
    Peer("diffusers eager", diffusers),
    Peer("torch.compile", diffusers, compiled=True),
)
