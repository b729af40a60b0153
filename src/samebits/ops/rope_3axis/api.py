"""Public functions of ``rope_3axis``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.rope_3axis.shape import angles_of
from samebits.registry import operator

_OP = operator("rope_3axis")


def rope_3axis(
    x: Tensor, cos: Tensor, sin: Tensor, *, contract: str | None = None, backend: str | None = None
) -> Tensor:
    """Partial rotary embedding: the first R of D channels of every head are rotated by the angles of its position.

    With half = R / 2 and rd one rounding to the dtype of x: y[j] = rd(rd(x[j]*c[j]) - rd(x[j+half]*s[j])) and
    y[j+half] = rd(rd(x[j+half]*c[j+half]) + rd(x[j]*s[j+half])) for j < half; the other channels are copied. c and s are
    cos and sin rounded to the dtype of x.

    Args:
        x: (..., S, N, D) BF16, FP16 or FP32; N heads, D at most 256. Any strides; read in place where the last axis is dense and
            the batch axes have one stride, so also a part of a fused (..., S, 3 N D) projection.
        cos, sin: (S, R) FP32, shared by the batch, or (..., S, R); R even, at most D. Constants: no gradient reaches them.
            ``samebits.rope_3axis_tables`` makes them from position ids.
        contract: ``"torch"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., S, N, D) in the dtype of x, contiguous: the bits of the model's own operations on any machine. Differentiable once,
        with the bits of their derivative by torch's autograd.

    Raises:
        TypeError: a dtype is not one of the above, or an argument is not a tensor.
        ValueError: shapes or devices are not accepted, or no backend of that name accepts the call.

    Source: diffusers' ``transformer_minimax_h3``.
    """
    (y,) = _OP.forward(x, *angles_of("rope_3axis", x, cos, sin), contract=contract, backend=backend)
    return y


def rope_3axis_backward(
    grad_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool] = (True,),
) -> tuple[Tensor | None]:
    """The explicit backward of :func:`rope_3axis`.

    Args:
        grad_y: (..., N, D), in the dtype of x.
        cos, sin: (..., R) FP32, with the batch axes of grad_y.
        grad_dtype: without effect; the gradient is rounded where the model's is, so it has the dtype of grad_y.
        wanted: whether to compute grad_x; else it is None.

    Returns:
        grad_x (..., N, D) in the dtype of grad_y.
    """
    (grad_x,) = _OP.backward(grad_y, cos, sin, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted)
    return (grad_x,)
