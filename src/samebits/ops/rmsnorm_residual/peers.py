"""What ``rmsnorm_residual`` is compared with."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def op_by_op(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """FP32 inside, one PyTorch operation per step, then the fork of the residual stream."""
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * rstd * gamma).to(x.dtype), x.clone()


def rounded_first(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The order of transformers: the normalised row goes to the dtype of x before it meets gamma."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (gamma * normed.to(x.dtype)).to(x.dtype), x.clone()


def library(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """PyTorch's fused norm. It has a fused kernel only where gamma has the dtype of x, so gamma arrives in BF16."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, eps), x.clone()


def liger(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor]:
    """Liger's Triton norm in its FP32 form. It has no fork, so the gradient of x lacks the residual's leg."""
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return (function.apply(x, gamma, eps, 0.0, "gemma", False),)


PEERS = (
    Peer("pytorch eager", op_by_op),
    Peer("transformers", rounded_first),
    Peer("torch.compile", op_by_op, compiled=True),
    Peer("rms_norm + clone", library, cast=(("gamma", "bfloat16"),)),
    Peer("Liger", liger, needs=("liger_kernel", "triton"), cuda=True, outputs=("y",)),
)
