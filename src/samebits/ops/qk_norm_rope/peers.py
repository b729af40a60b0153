"""What ``qk_norm_rope`` is compared with: the model's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer
from samebits.ops.rope_3axis.peers import rotate


def in_two_steps(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor]:
    """``nn.RMSNorm`` on each head, then the rotation, as the attention of diffusers' MiniMax-H3 does them."""
    return (rotate(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps), cos, sin),)


PEERS = (
    Peer("diffusers eager", in_two_steps),
    Peer("torch.compile", in_two_steps, compiled=True),
)
