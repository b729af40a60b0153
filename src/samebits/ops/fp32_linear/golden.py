"""What ``fp32_linear`` should give: FP64 throughout. Judges accuracy, never bits."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x, weight, bias = (inputs[name].double() for name in ("x", "weight", "bias"))
    return {"y": torch.addmm(bias, x, weight.mT)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    grad, x, weight = (inputs[name].double() for name in ("grad_y", "x", "weight"))
    return {"grad_x": grad @ weight, "grad_weight": grad.mT @ x, "grad_bias": grad.sum(0)}
