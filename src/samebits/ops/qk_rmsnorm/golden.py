"""What ``qk_rmsnorm`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits.

The ``rstd`` handed to the backward is not read, so a wrong one shows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x = inputs["x"].double()
    rstd = (x.square().mean(-1) + scalars["eps"]) ** -0.5
    return {"y": (x * rstd[..., None] * inputs["weight"].double()).to(inputs["x"].dtype), "rstd": rstd}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x, upstream = inputs["x"].double(), inputs["grad_y"].double()
    rstd = (x.square().mean(-1, keepdim=True) + scalars["eps"]) ** -0.5
    weighted, scaled = upstream * inputs["weight"].double(), x * rstd
    grad_x = rstd * (weighted - scaled * (weighted * scaled).mean(-1, keepdim=True))
    return {"grad_x": grad_x, "grad_weight": torch.einsum("tnd,tnd->d", upstream, scaled)}
