"""The frequencies of the features, made by the operations of diffusers on the device, so that they have its bits.

The three operations are a torch op of their own: under ``torch.compile`` they stay what they are, instead of being fused
into a kernel with another exponential.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samebits.exact import elementary
from samebits.operator import LIBRARY

MAX_PERIOD = 10000

_kept: dict[tuple[torch.device, int, str | None], Tensor] = {}


def frequencies(timestep: Tensor, num_channels: int) -> Tensor:
    """(num_channels / 2,) FP32 on the device of ``timestep``: 10000 ^ (-k / half). Kept for the next call where that is safe."""
    like = timestep.detach()
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return torch.ops.samebits.timestep_frequencies(like, num_channels)
    key = like.device, num_channels, elementary.chosen()
    known = _kept.get(key)
    if known is not None:
        return known
    made = _made(like, num_channels)
    if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's memory is not ours to keep
        _kept[key] = made
    return made


def _made(like: Tensor, num_channels: int) -> Tensor:
    half = num_channels // 2
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # a tensor made in inference mode could not be saved for a backward
        exponent = -math.log(MAX_PERIOD) * torch.arange(0, half, dtype=torch.float32, device=like.device)
        return elementary.exp(exponent / half)


def _shape(like: Tensor, num_channels: int) -> Tensor:
    return like.new_empty(num_channels // 2, dtype=torch.float32)


LIBRARY.define("timestep_frequencies(Tensor like, int num_channels) -> Tensor")
LIBRARY.impl("timestep_frequencies", _made, "CompositeExplicitAutograd")
torch.library.register_fake("samebits::timestep_frequencies", _shape, lib=LIBRARY)
