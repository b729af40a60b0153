"""Public functions of ``qk_rmsnorm``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("qk_rmsnorm")


def qk_rmsnorm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-5, contract: str | None = None, backend: str | None = None
) -> Tensor:
    """RMSNorm of every head: rd(weight * (rstd * x)), rstd = rsqrt(mean(x^2) + eps), rd one rounding to the dtype of x.

    Args:
        x: (..., N, D) BF16, FP16 or FP32; N heads, D at most 256. Any strides; read in place where the last axis is dense and the
            batch axes have one stride, so also a part of a fused (..., 3 N D) projection: what ``samebits.rmsnorm``, which
            has the same bits, would copy.
        weight: (D,) in the dtype of x.
        eps: finite, at least 2^-126.
        contract: ``"torch"`` (default): the sum of squares is added in the order of torch's fused CUDA kernel.
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., N, D) in the dtype of x, contiguous: on a GPU the bits of ``torch.nn.RMSNorm`` over the last axis, where D is a
        multiple of 4. Differentiable once: gradients are FP32 sums in a fixed order, rounded once to the dtype of x.

    Raises:
        TypeError: a dtype is not one of the above, the two differ, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: ``norm_q`` and ``norm_k`` of diffusers' ``MiniMaxH3Attention``.
    """
    y, _ = _OP.forward(x, weight, eps=eps, contract=contract, backend=backend)
    return y


def qk_rmsnorm_backward(
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
    """The explicit backward of :func:`qk_rmsnorm`.

    Args:
        grad_y: (..., N, D), in the dtype of x.
        x, weight, eps: as in the forward.
        rstd: (..., N) FP32, as ``torch.ops.samebits.qk_rmsnorm`` returned it; it is never recomputed.
        grad_dtype: dtype of both gradients, ``torch.float32`` or that of x (one rounding).
        wanted: which of (grad_x, grad_weight) to compute; the others are None.

    Returns:
        grad_x (..., N, D) and grad_weight (D,).
    """
    grad_x, grad_weight = _OP.backward(
        grad_y, x, weight, rstd, eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted
    )
    return grad_x, grad_weight
