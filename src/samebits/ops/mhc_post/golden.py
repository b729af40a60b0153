"""What ``mhc_post`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    mixed = torch.einsum("tij,tid->tjd", inputs["comb"].double(), inputs["residual"].double())
    added = torch.einsum("tj,td->tjd", inputs["post"].double(), inputs["sublayer"].double())
    return {"streams": (mixed + added).bfloat16()}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    upstream = inputs["grad_streams"].double()
    return {
        "grad_residual": torch.einsum("tij,tjd->tid", inputs["comb"].double(), upstream),
        "grad_sublayer": torch.einsum("tj,tjd->td", inputs["post"].double(), upstream),
        "grad_comb": torch.einsum("tid,tjd->tij", inputs["residual"].double(), upstream),
        "grad_post": torch.einsum("td,tjd->tj", inputs["sublayer"].double(), upstream),
    }
