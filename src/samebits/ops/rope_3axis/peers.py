"""What ``rope_3axis`` is compared with: the model's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (T, N, D) as the attention of diffusers' MiniMax-H3 rotates them, operation by operation."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    c, s = cos.to(x.dtype)[:, None, :], sin.to(x.dtype)[:, None, :]
    low, high = part.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return torch.cat((part * c + turned * s, rest), dim=-1).contiguous()


def op_by_op(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    return (rotate(x, cos, sin),)


PEERS = (
    Peer("diffusers eager", op_by_op),
    Peer("torch.compile", op_by_op, compiled=True),
)
