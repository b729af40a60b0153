"""What ``swiglu`` should give: FP64, rounded only where the model stores a value. Judges accuracy, never bits.

The model stores the SiLU of the gate in its own dtype, and the gradient of that SiLU. The SiLU is rounded by way of FP32, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    value, gate = (half.double() for half in inputs["x"].unbind(1))
    kind = inputs["x"].dtype
    return {"y": (value * _stored(gate * gate.sigmoid(), kind)).to(kind)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    value, gate = (half.double() for half in inputs["x"].unbind(1))
    upstream, kind = inputs["grad_y"].double(), inputs["x"].dtype
    half = torch.tanh(gate / 2) / 2  # the sigmoid less 1/2
    slope = 0.5 + half + gate * (0.25 - half * half)
    grad_value = upstream * _stored(gate * gate.sigmoid(), kind)
    grad_gate = _stored(upstream * value, kind) * slope
    return {"grad_x": torch.stack((grad_value, grad_gate), 1).to(kind)}


def _stored(wide: Tensor, kind: torch.dtype) -> Tensor:
    return wide.float().to(kind).double()
