"""Public functions of ``swiglu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("swiglu")


def swiglu(x: Tensor, *, contract: str | None = None, backend: str | None = None) -> Tensor:
    """The first half of every row times the SiLU of the second: rd(value * rd(silu(gate))), rd one rounding to the dtype of x.

    Args:
        x: (..., 2 F) BF16, FP16 or FP32, the columns of value, then those of gate. Any strides; read in place where the last
            axis is dense and the batch axes have one stride.
        contract: ``"torch"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., F) in the dtype of x, contiguous: on a GPU the bits of ``value * F.silu(gate)``. Differentiable once, with the bits of
        torch's autograd there.

    Raises:
        TypeError: the dtype is not one of the above, or x is not a tensor.
        ValueError: the last axis is odd or empty, or no backend of that name accepts the call.

    Source: diffusers' ``SwiGLU``.
    """
    (y,) = _OP.forward(_halves("swiglu", x), contract=contract, backend=backend)
    return y


def swiglu_backward(
    grad_y: Tensor,
    x: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool] = (True,),
) -> tuple[Tensor | None]:
    """The explicit backward of :func:`swiglu`.

    Args:
        grad_y: (..., F), in the dtype of x.
        x: (..., 2 F), as in the forward.
        grad_dtype: without effect; the gradient is rounded where the model's is, so it has the dtype of x.
        wanted: whether to compute grad_x; else it is None.

    Returns:
        grad_x (..., 2 F) in the dtype of x.
    """
    halves = _halves("swiglu_backward", x)
    (grad_x,) = _OP.backward(grad_y, halves, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted)
    return (None if grad_x is None else grad_x.flatten(-2),)


def _halves(what: str, x: Tensor) -> Tensor:
    """(..., 2 F) as (..., 2, F): a view."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: x must be a torch.Tensor, not {type(x).__name__}")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{what}: x has shape {tuple(x.shape)}, expected (..., 2 F): value, then gate")
    return x.view(*x.shape[:-1], 2, x.shape[-1] // 2)  # of any strides, and a fraction of what unflatten costs the host
