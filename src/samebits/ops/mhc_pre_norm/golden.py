"""What ``mhc_pre_norm`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits.

The gradients are those of the FP64 formula, by autograd; the norm reads the rounded ``hidden``, whose rounding has slope 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.mhc_pre.golden import doubled, formula, further_leg, pulled_back

LEAVES = ("residual", "weight", "gain", "bias", "gamma")


def _normed(results: dict[str, Tensor], gamma: Tensor, eps: float) -> dict[str, Tensor]:
    hidden = results["hidden"]
    stored = hidden + (hidden.detach().bfloat16().double() - hidden.detach())
    rstd = (stored.square().mean(-1) + eps).rsqrt()
    return results | {"hidden": stored, "normalized": stored * rstd[:, None] * gamma, "rstd": rstd}


def forward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    wide = doubled(inputs, LEAVES)
    results = _normed(formula(wide, scalars["eps"], contract), wide["gamma"], scalars["norm_eps"])
    return results | {name: results[name].bfloat16() for name in ("hidden", "normalized")}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = doubled(inputs, LEAVES, grad=True)
        results = _normed(formula(leaves, scalars["eps"], contract), leaves["gamma"], scalars["norm_eps"])
        found = pulled_back(results, leaves, inputs, ("hidden", "normalized", "post", "comb"))
    return found | {"grad_residual": found["grad_residual"] + further_leg(inputs, results["comb"])}
