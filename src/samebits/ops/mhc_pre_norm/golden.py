"""What ``mhc_pre_norm`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits.

The gradients are those of the FP64 formula, by autograd. The norm reads ``hidden`` as the forward stored it, in BF16: here and
there FP64 lies on the other side of a tie, and that would show in every gradient behind it. ``hidden`` itself is judged too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.mhc_pre.golden import doubled, formula, further_leg, pulled_back

LEAVES = ("residual", "weight", "gain", "bias", "gamma")


STORED = ("hidden",)
"""Results of the forward that a gradient is taken behind."""


def _normed(results: dict[str, Tensor], stored: Tensor, gamma: Tensor, eps: float) -> dict[str, Tensor]:
    hidden = results["hidden"] + (stored.double() - results["hidden"].detach())  # rounded, with slope 1
    rstd = (hidden.square().mean(-1) + eps).rsqrt()
    return results | {"hidden": hidden, "normalized": hidden * rstd[:, None] * gamma, "rstd": rstd}


def forward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    wide = doubled(inputs, LEAVES)
    results = formula(wide, scalars["eps"], contract)
    results = _normed(results, results["hidden"].bfloat16(), wide["gamma"], scalars["norm_eps"])
    return results | {name: results[name].bfloat16() for name in ("hidden", "normalized")}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = doubled(inputs, LEAVES, grad=True)
        results = formula(leaves, scalars["eps"], contract)
        results = _normed(results, inputs["hidden"], leaves["gamma"], scalars["norm_eps"])
        found = pulled_back(results, leaves, inputs, ("hidden", "normalized", "post", "comb"))
    return found | {"grad_residual": found["grad_residual"] + further_leg(inputs, results["comb"])}
