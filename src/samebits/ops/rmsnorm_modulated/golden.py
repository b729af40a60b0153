"""What ``rmsnorm_modulated`` should give: FP64, rounded only where the model stores a value. Judges accuracy, never bits.

The model stores the normalised row, 1 + scale and their product in its own dtype; gradients pass those roundings straight
through. The statistics are its own, so a wrong ``rstd`` shows. Only the normalised row that the gradient of scale sums up is
rounded as the forward stored it, from its ``rstd`` in FP32: FP64 lies on the other side of a tie here and there.
"""

from __future__ import annotations

import torch
from torch import Tensor

STORED = ("rstd",)
"""What decides on which side of a tie the forward stored the normalised row."""


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).double()


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    kind, x, index = inputs["x"].dtype, inputs["x"].double(), inputs["index"]
    rstd = (x.square().mean(-1) + scalars["eps"]) ** -0.5
    n = _stored(x * rstd[:, None] * inputs["weight"].double(), kind)
    factor = _stored(1 + inputs["scale"].double(), kind)[index]
    return {"y": (_stored(n * factor, kind) + inputs["shift"].double()[index]).to(kind), "rstd": rstd}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    kind, x, index, upstream = inputs["x"].dtype, inputs["x"].double(), inputs["index"], inputs["grad_y"].double()
    weight, scale = inputs["weight"].double(), inputs["scale"].double()
    rstd = (x.square().mean(-1, keepdim=True) + scalars["eps"]) ** -0.5
    scaled = x * rstd
    d_n = upstream * _stored(1 + scale, kind)[index]
    weighted = weight * d_n
    tables = torch.zeros(2, *scale.shape, dtype=torch.float64, device=scale.device)
    tables[0].index_add_(0, index, upstream)
    saved = inputs.get("rstd", rstd.squeeze(-1).float())
    n = inputs["weight"].float() * (saved[:, None] * inputs["x"].float())
    tables[1].index_add_(0, index, upstream * _stored(n, kind))
    return {
        "grad_x": rstd * (weighted - scaled * (weighted * scaled).mean(-1, keepdim=True)),
        "grad_weight": torch.einsum("th,th->h", d_n, scaled),
        "grad_shift": tables[0],
        "grad_scale": tables[1],
    }
