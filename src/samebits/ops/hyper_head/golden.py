"""What ``hyper_head`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits.

The gradients are those of the FP64 formula, by autograd, as in ``mhc_pre``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.mhc_pre.golden import EPS, LEAVES, controller, doubled, pulled_back


def _formula(inputs: dict[str, Tensor], eps: float, contract: str) -> dict[str, Tensor]:
    residual, weight, gain, bias = (inputs[name] for name in LEAVES)
    logits, proj, r, q = controller(residual, weight, gain, bias, eps, contract)
    pre = logits.sigmoid() + EPS
    hidden = torch.einsum("ti,tid->td", pre, residual)
    return {"hidden": hidden, "pre": pre, "logits": logits, "proj": proj, "r": r, "q": q}


def forward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    results = _formula(doubled(inputs, LEAVES), scalars["eps"], contract)
    return results | {"hidden": results["hidden"].bfloat16()}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = doubled(inputs, LEAVES, grad=True)
        return pulled_back(_formula(leaves, scalars["eps"], contract), leaves, inputs, ("hidden",))
