"""What ``timestep_sinusoid`` should give, in FP64 throughout. Judges accuracy, never bits.

The gradient is that of the formula at the time itself: the ``features`` handed to the backward are not read, so wrong ones
show.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    angle = _angles(inputs)
    return {"features": torch.cat([angle.cos(), angle.sin()], dim=1)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    angle = _angles(inputs)
    slope = torch.cat([-angle.sin(), angle.cos()], dim=1) * inputs["frequencies"].double().repeat(2)
    return {"grad_timestep": torch.einsum("tc,tc->t", inputs["grad_features"].double(), slope)}


def _angles(inputs: dict[str, Tensor]) -> Tensor:
    """(T, F). Times outside the unit interval have none."""
    time = inputs["timestep"].double()
    inside = time.clamp(0, 1) == time
    return torch.outer(torch.where(inside, time, torch.nan), inputs["frequencies"].double())
