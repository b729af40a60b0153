"""The conditioning chain op for op as diffusers runs it, in eager torch, without diffusers.

One function per stage, with the signature of the samebits operator of that name, so that any implementation of a stage can
stand in for any other. Each eager operation on BF16 tensors computes in FP32 and rounds once; which operations there are,
and in which order, is the arithmetic of ``transformer_minimax_h3.py`` (diffusers 0.42.1), whose bits the tests compare.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from samebits.models.minimax_h3.geometry import CHUNKS, EPS, MODALITIES

MAX_PERIOD = 10000


def timestep_sinusoid(timestep: Tensor, num_channels: int = 256) -> Tensor:
    """(T,) to (T, num_channels) FP32: cosines of all frequencies, then sines."""
    half = num_channels // 2
    exponent = -math.log(MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=timestep.device)
    frequency = torch.exp(exponent / half)
    angle = timestep[:, None].float() * frequency[None, :]
    return torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1)


def timestep_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """(T, K) to (T, D): linear, SiLU, linear, all FP32."""
    return functional.linear(functional.silu(functional.linear(x, w1, b1)), w2, b2)


def adaln_projection(temb: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(T, D) FP32 to the modulation table (T, 18H) in the weight's dtype. The SiLU is FP32 and cast once."""
    return functional.linear(functional.silu(temb).to(weight.dtype), weight, bias)


def adaln_row_gather(table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Six (S, H) from the rows (3T, 6H) of a table: every chunk of row ``index[s]``."""
    return tuple(chunk.index_select(0, index) for chunk in table.chunk(CHUNKS, dim=-1))


def adaln_modulation(temb: Tensor, weight: Tensor, bias: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Projection and gather as one."""
    return adaln_row_gather(table_rows(adaln_projection(temb, weight, bias)), index)


def rmsnorm_modulated(
    x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float = EPS
) -> Tensor:
    """(..., S, H): RMSNorm, times 1 + scale, plus shift, of table row ``index[s]``."""
    normed = functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)


def adaln_gate_residual(residual: Tensor, y: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """(..., S, H): residual + gate * y, of table row ``index[s]``."""
    return residual + gate.index_select(0, index) * y


def final_adaln_out(
    x: Tensor,
    norm_weight: Tensor,
    temb: Tensor,
    weight: Tensor,
    bias: Tensor,
    timestep_indices: Tensor,
    eps: float = EPS,
) -> Tensor:
    """(..., S, H): the last norm, modulated by a table with one row per timestep; shift is its first half."""
    shift, scale = functional.linear(functional.silu(temb).to(weight.dtype), weight, bias).chunk(2, dim=-1)
    return rmsnorm_modulated(x, norm_weight, shift, scale, timestep_indices, eps)


def table_rows(table: Tensor) -> Tensor:
    """(T, 18H) as (3T, 6H): one row for each timestep and modality. A view."""
    return table.view(table.shape[0] * MODALITIES, -1)


# --- the rest of a block ----------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K) to (..., N)."""
    return functional.linear(x, weight, bias)


def qk_rmsnorm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """RMSNorm of every head of (..., N, D)."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_3axis(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, S, N, D): the first channels of every head rotated by the angles of its position, (S, R) FP32."""
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    c, s = (table.to(x.dtype)[None, :, None, :] for table in (cos, sin))
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((rotated * c + torch.cat((-second, first), dim=-1) * s, rest), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, S, N, D), without a mask: whichever kernel torch takes."""
    attended = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return attended.transpose(1, 2)


def swiglu(x: Tensor) -> Tensor:
    """(..., 2F), value and gate side by side, to (..., F)."""
    value, gate = x.chunk(2, dim=-1)
    return value * functional.silu(gate)
