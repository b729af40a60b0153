"""What ``fp32_gemm_rms`` should give: FP64. Judges accuracy, never bits.

The gradients are those of the formula, from FP64 statistics of its own: the r and q handed to the backward are not read,
so wrong ones show. A row of zeros has no slope; the contract says that its RMS leg is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _statistics(x: Tensor, eps: float, contract: str) -> tuple[Tensor, Tensor, Tensor]:
    """(r, q, d r / d x divided by x), each (T,)."""
    mean = x.square().mean(-1)
    if contract.endswith("-dsv4"):
        r = (mean + eps) ** -0.5
        return r, mean, -(r**3) / x.shape[-1]
    q = mean.sqrt()
    r = 1 / (q + eps)
    return r, q, -r.square() / (x.shape[-1] * torch.where(q == 0, 1.0, q))


def forward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    x = inputs["x"].double()
    r, q, _ = _statistics(x, scalars["eps"], contract)
    return {"proj": torch.einsum("tk,nk->tn", x, inputs["weight"].double()), "r": r, "q": q}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    x, upstream = inputs["x"].double(), inputs["grad_proj"].double()
    _, _, slope = _statistics(x, scalars["eps"], contract)
    legs = torch.einsum("tn,nk->tk", upstream, inputs["weight"].double())
    grad_x = legs + (inputs["grad_r"].double() * slope)[:, None] * x
    grad_weight = torch.einsum("tn,tk->nk", upstream, x)
    if inputs.get("start_weight") is not None:
        grad_weight = grad_weight + inputs["start_weight"].double()
    return {"grad_x": grad_x, "grad_weight": grad_weight}
