"""What ``adaln_projection`` is compared with: the two lines of diffusers, whose product is cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench import modes
from samebits.bench.peers import Peer


def op_by_op(temb: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """FP32 SiLU, one cast, linear: as ``MiniMaxH3AdaLayerNormModulation`` of diffusers writes it."""
    act = torch.nn.functional.silu(temb).to(weight.dtype)
    return (torch.nn.functional.linear(act, weight, bias),)


PEERS = (
    Peer("diffusers eager", op_by_op, modes=modes.BF16_GEMM),
    Peer("torch.compile", op_by_op, compiled=True),
)
