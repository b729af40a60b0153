"""A table of angles beside heads, as callers have them."""

from __future__ import annotations

import math

from torch import Tensor

from samebits.ops.rope_3axis.spec import SPEC


def angles_of(what: str, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (S, R) for x (..., S, N, D), with the batch axes of x. They are repeated where x has several batches.

    Raises TypeError and ValueError with ``what`` (the caller's name) in front.
    """
    for name, tensor, form in (("x", x, "(..., S, N, D)"), ("cos", cos, "(S, R)"), ("sin", sin, "(S, R)")):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dim() < (3 if name == "x" else 2):
            raise ValueError(f"{what}: {name} has shape {tuple(tensor.shape)}, expected {form}")
    rotated, columns = cos.shape[-1], x.shape[-1]
    if SPEC.misfit({"R": rotated, "D": columns}):
        accepted = f"accepted is an even number up to the head dimension {columns}"
        raise ValueError(f"{what}: cos and sin have R = {rotated} columns; {accepted}")
    lead = x.shape[:-2]
    made = []
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.dim() == 2 and len(lead) > 1 and angle.shape[0] == lead[-1]:
            if math.prod(lead[:-1]) == 1:
                angle = angle.view(*lead, angle.shape[-1])
            else:
                angle = angle.expand(*lead, angle.shape[-1]).contiguous()
        if angle.shape[:-1] != lead:
            wanted = f"({lead[-1]}, R) or ({', '.join(map(str, lead))}, R)"
            raise ValueError(f"{what}: {name} has shape {tuple(angle.shape)}, expected {wanted}")
        made.append(angle)
    return made[0], made[1]
