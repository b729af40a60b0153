"""What ``timestep_mlp`` should give: FP64 throughout, the gradients by autograd. Judges accuracy, never bits.

The saved ``pre`` and ``act`` that the backward is handed are not read, so wrong ones show.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_LEAVES = ("x", "w1", "b1", "w2", "b2")


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x, w1, b1, w2, b2 = (inputs[name].double() for name in _LEAVES)
    pre = functional.linear(x, w1, b1)
    act = functional.silu(pre)
    return {"y": functional.linear(act, w2, b2), "pre": pre, "act": act}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = {name: inputs[name].detach().double().requires_grad_() for name in _LEAVES}
        y = forward(leaves, scalars)["y"]
        grads = torch.autograd.grad(y, list(leaves.values()), inputs["grad_y"].double())
    return {f"grad_{name}": grad for name, grad in zip(_LEAVES, grads, strict=True)}
