"""Public functions of ``rmsnorm``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("rmsnorm")


def rmsnorm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-5, contract: str | None = None, backend: str | None = None
) -> Tensor:
    """RMSNorm over the last axis: rd(weight * (rstd * x)), rstd = rsqrt(mean(x^2) + eps), rd one rounding to the dtype of x.

    Args:
        x: (..., H) BF16, FP16 or FP32. Any strides; read in place where the last axis is dense.
        weight: (H,) in the dtype of x.
        eps: finite, at least 2^-126.
        contract: ``"torch"`` (default): the sum of squares is added in the order of torch's fused CUDA kernel.
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., H) in the dtype of x, contiguous: on a GPU the bits of ``torch.nn.functional.rms_norm`` where that takes its
        fused vectorised kernel (H a multiple of 4, addresses aligned to 4 elements). Differentiable once: gradients are FP32
        sums in a fixed order, rounded once to the dtype of x; the backward of torch has other bits.

    Raises:
        TypeError: a dtype is not one of the above, the two differ, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: ``torch.nn.RMSNorm`` as in diffusers' ``MiniMaxH3TransformerBlock``.
    """
    y, _ = _OP.forward(x, weight, eps=eps, contract=contract, backend=backend)
    return y


def rmsnorm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float = 1e-5,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The explicit backward of :func:`rmsnorm`.

    Args:
        grad_y: (..., H), in the dtype of x.
        x, weight, eps: as in the forward.
        rstd: (...) FP32, as ``torch.ops.samebits.rmsnorm`` returned it; it is never recomputed.
        grad_dtype: dtype of both gradients, ``torch.float32`` or that of x (one rounding).
        wanted: which of (grad_x, grad_weight) to compute; the others are None.

    Returns:
        grad_x (..., H) and grad_weight (H,).
    """
    grad_x, grad_weight = _OP.backward(
        grad_y, x, weight, rstd, eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted
    )
    return grad_x, grad_weight
