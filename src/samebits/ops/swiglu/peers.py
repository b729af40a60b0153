"""What ``swiglu`` is compared with: the model's own operations, its own module, and Liger's kernel."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def op_by_op(x: Tensor) -> tuple[Tensor]:
    """The gate of diffusers' SwiGLU, operation by operation."""
    value, gate = x.flatten(-2).chunk(2, dim=-1)
    return (value * torch.nn.functional.silu(gate),)


def module(x: Tensor) -> tuple[Tensor]:
    """diffusers' SwiGLU itself, with a projection that passes what it is given."""
    activations = importlib.import_module("diffusers.models.activations")
    gated = activations.SwiGLU(1, 1)
    gated.proj = torch.nn.Identity()
    return (gated(x.flatten(-2)),)


def liger(x: Tensor) -> tuple[Tensor]:
    """Liger's Triton kernel, which takes the two halves."""
    function = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    value, gate = x.unbind(-2)
    return (function.apply(gate.contiguous(), value.contiguous()),)


PEERS = (
    Peer("diffusers eager", op_by_op),
    Peer("diffusers SwiGLU", module, needs=("diffusers",)),
    Peer("torch.compile", op_by_op, compiled=True),
    Peer("Liger", liger, needs=("liger_kernel", "triton"), cuda=True),
)
