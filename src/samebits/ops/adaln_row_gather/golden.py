"""What ``adaln_row_gather`` should give: copies, and sums in FP64. Judges accuracy, never bits."""

from __future__ import annotations

import torch
from torch import Tensor

_NAMES = ("shift_msa", "scale_msa", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    rows = inputs["table"][inputs["index"]]
    return {name: rows[:, at] for at, name in enumerate(_NAMES)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    upstream = torch.stack([inputs[f"grad_{name}"].double() for name in _NAMES], dim=1)
    total = torch.zeros_like(inputs["table"], dtype=torch.float64)
    return {"grad_table": total.index_add(0, inputs["index"], upstream)}
