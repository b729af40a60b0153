"""Public functions of ``h_aggregate``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("h_aggregate")


def h_aggregate(pre: Tensor, residual: Tensor, *, contract: str | None = None, backend: str | None = None) -> Tensor:
    """Collapse the residual streams of a hyper-connection into the input of its sublayer.

    hidden[..., d] = bf16((pre0*r0 + pre1*r1) + (pre2*r2 + pre3*r3)), every product and sum rounded to FP32 first.

    Args:
        pre: (..., 4) FP32, the collapse weights.
        residual: (..., 4, D) BF16, the streams. Any strides; read in place where the last axis is dense.
        contract: ``"ascending"`` (default, published) or ``"tree256"``; they differ in the order of the gradient of ``pre``.
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        hidden: (..., D) BF16, contiguous. Differentiable once in ``pre`` (FP32 gradient) and ``residual`` (BF16 gradient).

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes or devices do not fit together, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC, pre-mix collapse (profile ``oracle-fp32-mhc-v1``).
    """
    (hidden,) = _OP.forward(pre, residual, contract=contract, backend=backend)
    return hidden


def h_aggregate_backward(
    grad_hidden: Tensor,
    pre: Tensor,
    residual: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The explicit backward of :func:`h_aggregate`, for composites that keep the gradient in FP32 until legs are merged.

    Args:
        grad_hidden: (..., D) FP32 or BF16.
        pre, residual: as in the forward.
        grad_dtype: dtype of the gradient of ``residual``, ``torch.float32`` or ``torch.bfloat16`` (one rounding).
        wanted: which of (grad_pre, grad_residual) to compute; the others are None.

    Returns:
        grad_pre (..., 4) FP32 and grad_residual (..., 4, D).
    """
    grad_pre, grad_residual = _OP.backward(
        grad_hidden, pre, residual, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted
    )
    return grad_pre, grad_residual
