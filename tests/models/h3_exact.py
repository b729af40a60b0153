"""A candidate for every stage that keeps all promises on a CPU: golden values rounded once, so that faults can be planted."""

from __future__ import annotations

import torch

from samebits.models.minimax_h3 import provider
from samebits.models.minimax_h3.golden import Golden

GOLDEN = Golden(torch.bfloat16)
MODEL, EMBEDDER = torch.bfloat16, torch.float32


def timestep_sinusoid(timestep, num_channels=256):
    return GOLDEN.timestep_sinusoid(timestep, num_channels).to(EMBEDDER)


def timestep_mlp(x, w1, b1, w2, b2):
    return GOLDEN.timestep_mlp(x, w1, b1, w2, b2).to(EMBEDDER)


def adaln_projection(temb, weight, bias):
    return GOLDEN.adaln_projection(temb, weight, bias).to(MODEL)


def adaln_row_gather(table, index):
    return provider.adaln_row_gather(table, index)


def adaln_modulation(temb, weight, bias, index):
    return tuple(chunk.to(MODEL) for chunk in GOLDEN.adaln_modulation(temb, weight, bias, index))


def rmsnorm_modulated(x, weight, shift, scale, index, eps=1e-5):
    return GOLDEN.rmsnorm_modulated(x, weight, shift, scale, index, eps).to(MODEL)


def adaln_gate_residual(residual, y, gate, index):
    return provider.adaln_gate_residual(residual, y, gate, index)


def final_adaln_out(x, norm_weight, temb, weight, bias, timestep_indices, eps=1e-5):
    return GOLDEN.final_adaln_out(x, norm_weight, temb, weight, bias, timestep_indices, eps).to(MODEL)


STAGES = (
    timestep_sinusoid,
    timestep_mlp,
    adaln_projection,
    adaln_row_gather,
    adaln_modulation,
    rmsnorm_modulated,
    adaln_gate_residual,
    final_adaln_out,
)


def bindings(**faulty):
    """A callable for every stage; ``faulty`` ones in place of the exact."""
    return {function.__name__: function for function in STAGES} | faulty
