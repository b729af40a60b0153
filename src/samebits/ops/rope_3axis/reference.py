"""Defines the bits of ``rope_3axis`` and of what other operators take from it. One FP32 rounding per written operation, then
one to the dtype of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call


def _halves(rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Both halves of the rotated columns of (T, N, D), and of the angles as (T, 1, R / 2), all FP32."""
    half = cos.shape[-1] // 2
    columns = rows[..., : 2 * half].float()
    c, s = (angle.to(rows.dtype).float()[:, None, :] for angle in (cos, sin))
    return (
        columns[..., :half], columns[..., half:],
        c[..., :half], c[..., half:], s[..., :half], s[..., half:],
    )  # fmt: skip


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rd(rd(x1*c1) - rd(x2*s1)), rd(rd(x2*c2) + rd(x1*s2)) and the columns behind, of (T, N, D) rows."""

    def rd(value: Tensor) -> Tensor:
        return value.to(x.dtype).float()

    x1, x2, c1, c2, s1, s2 = _halves(x, cos, sin)
    first, second = rd(x1 * c1) - rd(x2 * s1), rd(x2 * c2) + rd(x1 * s2)
    return torch.cat((first.to(x.dtype), second.to(x.dtype), x[..., cos.shape[-1] :]), dim=-1)


def gradient(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rd(rd(g1*c1) + rd(g2*s2)) + 0, rd(rd(g2*c2) - rd(g1*s1)) + 0 and the columns behind + 0, as autograd computes them.

    The two slices of x hand back gradients with zeros where the other one is, and their sum is the gradient: -0 + 0 = +0.
    """

    def rd(value: Tensor) -> Tensor:
        return value.to(grad.dtype).float()

    g1, g2, c1, c2, s1, s2 = _halves(grad, cos, sin)
    first, second = rd(rd(g1 * c1) + rd(g2 * s2)), rd(rd(g2 * c2) - rd(g1 * s1))
    joined = torch.cat((first, second, grad[..., cos.shape[-1] :].float()), dim=-1)
    return (joined + torch.zeros_like(joined)).to(grad.dtype)


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    angles = inputs["cos"], inputs["sin"]
    if call.backward:
        results["grad_x"].copy_(gradient(inputs["grad_y"], *angles))
    else:
        results["y"].copy_(rotated(inputs["x"], *angles))
