"""What ``fp32_gemm_rms`` is compared with: the library's FP32 product. TF32 is off, which is torch's default."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench import modes
from samebits.bench.peers import Peer


def op_by_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """An FP32 copy of x, cuBLAS, and the RMS as Megatron writes it."""
    wide = x.float()
    norm = wide.norm(dim=-1) / wide.shape[-1] ** 0.5
    return wide @ weight.T, 1 / (norm + eps)


def dsv4(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same with the RMS of transformers and of the DeepSeek-V4 inference code."""
    wide = x.float()
    return torch.nn.functional.linear(wide, weight), torch.rsqrt(wide.square().mean(-1) + eps)


PEERS = (
    Peer("pytorch eager", op_by_op, modes=modes.FP32_GEMM),
    Peer("pytorch eager, dsv4", dsv4),
    Peer("torch.compile", op_by_op, compiled=True),
)
