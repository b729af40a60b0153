"""What ``rmsnorm_residual`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits.

The gradient is that of the formula, from FP64 statistics of its own: the ``rstd`` handed to the backward is not read,
so a wrong one shows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x = inputs["x"].double()
    rstd = (x.square().mean(-1) + scalars["eps"]) ** -0.5
    y = x * rstd[:, None] * inputs["gamma"].double()
    return {"y": y.bfloat16(), "residual": inputs["x"], "rstd": rstd}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x, upstream = inputs["x"].double(), inputs["grad_y"].double()
    rstd = (x.square().mean(-1, keepdim=True) + scalars["eps"]) ** -0.5
    weighted = upstream * inputs["gamma"].double()
    normed = x * rstd
    grad_x = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    if inputs.get("grad_residual") is not None:
        grad_x = grad_x + inputs["grad_residual"].double()
    grad_gamma = torch.einsum("td,td->d", upstream, normed)
    start = inputs.get("start_gamma")
    return {"grad_x": grad_x, "grad_gamma": grad_gamma if start is None else grad_gamma + start.double()}
