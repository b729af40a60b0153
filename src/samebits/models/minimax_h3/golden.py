"""The conditioning chain and a block in FP64, which judges accuracy.

Same signatures as ``provider``. A value is rounded only where the model itself stores it in its own dtype and reads it
again: the activation in front of a projection, the modulation table, the normed row, 1 + scale, the residual stream, what a linear,
a norm, a rotation or attention hands on, cosines and sines. The
activation is the FP32 SiLU rounded once, as in the model; the SiLU of an FP64 number would fall on the other side of some
ties. These roundings are straight through: the value is replaced, the gradient passes. Results are not rounded.

Nothing here is shared with ``provider`` or with an operator's reference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from samebits.models.minimax_h3.geometry import CHUNKS, EPS, MODALITIES
from samebits.models.minimax_h3.measure import rounded

PERIOD = 10000.0


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, exact: Tensor, value: Tensor) -> Tensor:
        return value.double()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Golden:
    """The stages for a model that stores its rows in ``dtype``. Inputs of any floating dtype, results FP64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def stored(self, value: Tensor) -> Tensor:
        """As the model reads it back; the gradient passes unchanged."""
        kept: Tensor = _Stored.apply(value.double(), rounded(value.detach().double(), self.dtype))
        return kept

    def _activation(self, temb: Tensor) -> Tensor:
        in_model = functional.silu(temb.detach().float()).to(self.dtype)
        exact = temb.double()
        activated: Tensor = _Stored.apply(exact * torch.sigmoid(exact), in_model)
        return activated

    def timestep_sinusoid(self, timestep: Tensor, num_channels: int = 256) -> Tensor:
        half = num_channels // 2
        k = torch.arange(half, dtype=torch.float64, device=timestep.device)
        angle = timestep.double().unsqueeze(-1) * torch.exp(k * (-math.log(PERIOD) / half))
        return torch.cat((angle.cos(), angle.sin()), -1)

    def timestep_mlp(self, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        z = x.double() @ w1.double().mT + b1.double()
        return (z * torch.sigmoid(z)) @ w2.double().mT + b2.double()

    def adaln_projection(self, temb: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._activation(temb) @ weight.double().mT + bias.double()

    def adaln_row_gather(self, table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.stored(table)[index].chunk(CHUNKS, -1))

    def adaln_modulation(self, temb: Tensor, weight: Tensor, bias: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        table = self.adaln_projection(temb, weight, bias)
        return self.adaln_row_gather(table.view(MODALITIES * temb.shape[0], -1), index)

    def rmsnorm_modulated(
        self, x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float = EPS
    ) -> Tensor:
        rows = self.stored(x)
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.double()
        factor = self.stored(1.0 + self.stored(scale))
        return self.stored(normed) * factor[index] + self.stored(shift)[index]

    def adaln_gate_residual(self, residual: Tensor, y: Tensor, gate: Tensor, index: Tensor) -> Tensor:
        return self.stored(residual) + self.stored(gate)[index] * self.stored(y)

    def final_adaln_out(
        self,
        x: Tensor,
        norm_weight: Tensor,
        temb: Tensor,
        weight: Tensor,
        bias: Tensor,
        timestep_indices: Tensor,
        eps: float = EPS,
    ) -> Tensor:
        table = self._activation(temb) @ weight.double().mT + bias.double()
        shift, scale = table.chunk(2, -1)
        return self.rmsnorm_modulated(x, norm_weight, shift, scale, timestep_indices, eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self.stored(x) @ weight.double().mT
        return product if bias is None else product + bias.double()

    def qk_rmsnorm(self, x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
        heads = self.stored(x)
        return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.double()

    def rope_3axis(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = (self.stored(table).unsqueeze(-2) for table in (cos, sin))
        rows, width = self.stored(x), cos.shape[-1]
        one, two = rows[..., : width // 2], rows[..., width // 2 : width]
        turned = torch.cat((-two, one), -1)
        return torch.cat((rows[..., :width] * c + turned * s, rows[..., width:]), -1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [self.stored(part).movedim(-2, 1) for part in (q, k, v)]
        made = [_attend(*one) for one in zip(*(part.unbind(1) for part in heads), strict=True)]
        return torch.stack(made, -2)

    def swiglu(self, x: Tensor) -> Tensor:
        value, gate = self.stored(x).chunk(2, -1)
        return value * self._activation(gate)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, (B, S, D). A head at a time, and its scores again in the backward, as all of them would fill a GPU."""
    attended: Tensor = checkpoint(_softmax_product, q, k, v, use_reentrant=False)
    return attended


def _softmax_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
