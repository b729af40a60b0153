"""Defines the bits of ``timestep_sinusoid``. One FP32 rounding per written operation; runs on any device.

``sin`` and ``cos`` are the device's own; ``samebits.bits_of`` gives a CPU those of a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold

LARGEST_ARGUMENT = 65536.0


def forward(timestep: Tensor, frequencies: Tensor) -> Tensor:
    """timestep [T], frequencies [F] to features [T, 2F], FP32: cos(t f), then sin(t f). NaN for a time outside [0, 1]."""
    time = timestep.float()[:, None]
    argument = time * frequencies
    valid = (time >= 0) & (time <= 1) & (argument.abs() <= LARGEST_ARGUMENT)
    features = torch.cat((elementary.cos(argument), elementary.sin(argument)), -1)
    return torch.where(valid.repeat(1, 2), features, torch.nan)


def backward(grad_features: Tensor, frequencies: Tensor, features: Tensor) -> Tensor:
    """grad_timestep [T], FP32: the sum over channels of -(grad_cos * sin) * f and (grad_sin * cos) * f."""
    grad_cos, grad_sin = grad_features.chunk(2, -1)
    cos, sin = features.chunk(2, -1)
    terms = torch.cat((-(grad_cos * sin) * frequencies, (grad_sin * cos) * frequencies), -1)
    channels = terms.shape[-1]
    padded = 1 << (channels - 1).bit_length()
    return fold.halving_tree(torch.nn.functional.pad(terms, (0, padded - channels)))


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    frequencies = inputs["frequencies"]
    if not call.backward:
        results["features"].copy_(forward(inputs["timestep"], frequencies))
    else:
        results["grad_timestep"].copy_(backward(inputs["grad_features"], frequencies, inputs["features"]))
