"""What ``rope_3axis`` should give: FP64, rounded only where the model stores a value. Judges accuracy, never bits.

The rotation as a matrix of two by two for each pair of channels; its derivative is the transposed matrix. The model stores the
angles and both products of a channel in its own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _matrix(cos: Tensor, sin: Tensor, kind: torch.dtype) -> Tensor:
    """(T, R / 2, 2, 2): row i, column k is what channel i of a pair takes from channel k."""
    c, s = (angle.to(kind).double().unflatten(-1, (2, -1)).movedim(-2, -1) for angle in (cos, sin))
    return torch.stack((torch.stack((c[..., 0], -s[..., 0]), -1), torch.stack((s[..., 1], c[..., 1]), -1)), -2)


def turned(rows: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Rows (T, N, D) through the matrices of their positions, or through the transposed ones; in the dtype of the rows."""
    kind, width = rows.dtype, cos.shape[-1]
    matrix = _matrix(cos, sin, kind)[:, None]
    pairs = rows[..., :width].double().unflatten(-1, (2, -1)).movedim(-2, -1)
    products = (matrix.mT if back else matrix) * pairs[..., None, :]
    sums = products.to(kind).double().sum(-1)
    return torch.cat((sums.movedim(-1, -2).flatten(-2).to(kind), rows[..., width:]), dim=-1)


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    return {"y": turned(inputs["x"], inputs["cos"], inputs["sin"], back=False)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    return {"grad_x": turned(inputs["grad_y"], inputs["cos"], inputs["sin"], back=True)}
