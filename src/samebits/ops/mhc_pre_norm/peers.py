"""What ``mhc_pre_norm`` is compared with: hyper-connection and norm as a model file writes them, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench import modes
from samebits.bench.peers import Peer
from samebits.ops.mhc_pre import peers as mhc_pre


def op_by_op(
    residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, gamma: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, post, comb = mhc_pre.op_by_op(residual, weight, gain, bias, eps)
    wide = hidden.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
    return hidden, (wide * rstd * gamma).to(hidden.dtype), post, comb


PEERS = (
    Peer("pytorch eager", op_by_op, modes=modes.FP32_GEMM),
    Peer("torch.compile", op_by_op, compiled=True),
)
