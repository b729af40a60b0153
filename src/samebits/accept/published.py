"""Inputs of the public acceptance cases: ``torch.randn`` on the CPU from a seed made of the case's name.

The bits of ``torch.randn`` depend on the vector unit: with AVX2 or later these are the tensors of the public manifest,
elsewhere they are others (the BF16 ones nearly always the same). An oracle on the same inputs is right either way.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.accept.batch import Batch, Weights
from samebits.accept.contract import LayerContract

HIDDEN = 128
_SEED = 2026


@dataclass(frozen=True)
class Draws:
    """A CPU generator whose draws follow one another."""

    generator: torch.Generator

    @classmethod
    def of(cls, name: str) -> Draws:
        word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        return cls(torch.Generator().manual_seed(_SEED + word))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale


def batch(name: str, rows: int, contract: LayerContract) -> Batch:
    """The draws in the order of the public recipe."""
    hidden, width = contract.hidden, contract.controller_k
    draws = Draws.of(name)
    r_old = draws.normal(rows, 4, hidden).bfloat16()
    y = draws.normal(rows, hidden).bfloat16()
    controller = draws.normal(contract.controller_n, width, scale=1 / math.sqrt(width))
    pre, post, res = (draws.normal(1, scale=0.5) for _ in range(3))
    bias = draws.normal(contract.controller_n, scale=0.1)
    gamma = 1 + draws.normal(hidden, scale=0.05)
    upstream = Draws.of(f"{name}.grad")
    return Batch(
        contract=contract,
        weights=Weights(controller, pre, post, res, bias, gamma),
        token_id=1000 + torch.arange(rows),
        r_old=r_old,
        y=y,
        d_r_new=upstream.normal(rows, 4, hidden).bfloat16(),
        d_normalized=upstream.normal(rows, hidden).bfloat16(),
        d_residual=upstream.normal(rows, hidden, scale=0.25).bfloat16(),
    ).sealed()


def sinkhorn_edges() -> dict[str, Tensor]:
    """Logits at the edges of the split, and gradients of its three results."""
    rows = (
        (-30.0, -8.0, 8.0, 30.0) * 6,
        (0.0,) * 8 + (0.75,) * 16,
        (0.0,) * 24,
        (0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 3.0, -3.0, 40.0, -40.0) + (0.0,) * 14,
    )
    upstream = Draws.of("sinkhorn_edges.grad")
    return {
        "h": torch.tensor(rows),
        "d_pre": upstream.normal(4, 4),
        "d_post": upstream.normal(4, 4),
        "d_c": upstream.normal(4, 4, 4),
    }


def rms_edges() -> dict[str, Tensor]:
    """Rows at the edges of the norm (zeros, tiny, large, a ramp), its gain, and gradients of its two results."""
    rows = (
        torch.zeros(HIDDEN),
        torch.full((HIDDEN,), 2.0**-12),
        torch.full((HIDDEN,), 4.0),
        torch.linspace(-8, 8, HIDDEN),
    )
    gamma = 1 + Draws.of("rms_edges.gamma").normal(HIDDEN, scale=0.05)
    upstream = Draws.of("rms_edges.grad")
    return {
        "x": torch.stack(rows).bfloat16(),
        "gamma": gamma,
        "dy": upstream.normal(4, HIDDEN).bfloat16(),
        "d_residual": upstream.normal(4, HIDDEN, scale=0.25).bfloat16(),
    }
