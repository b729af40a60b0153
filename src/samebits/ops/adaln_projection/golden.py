"""What ``adaln_projection`` should give: FP64, rounded only where the model stores a value. Judges accuracy, never bits.

The model rounds the *FP32* SiLU to the dtype of the weight. An FP64 SiLU, rounded, would be another number near ties.
For the gradient that rounding has the identity as its derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _stored(temb: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.silu(temb).to(weight.dtype).double()


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    weight = inputs["weight"]
    table = _stored(inputs["temb"], weight) @ weight.double().T + inputs["bias"].double()
    return {"table": table.to(weight.dtype)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    grad, temb, weight = inputs["grad_table"].double(), inputs["temb"].double(), inputs["weight"]
    gate = torch.special.expit(temb)
    slope = gate + temb * gate * (1 - gate)
    return {
        "grad_temb": (grad @ weight.double()) * slope,
        "grad_weight": grad.T @ _stored(inputs["temb"], weight),
        "grad_bias": grad.sum(0),
    }
