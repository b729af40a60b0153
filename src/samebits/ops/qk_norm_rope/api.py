"""Public functions of ``qk_norm_rope``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.rope_3axis.shape import angles_of
from samebits.registry import operator

_OP = operator("qk_norm_rope")


def qk_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-5,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm of every head of q or k, then its rotary embedding: ``rope_3axis(qk_rmsnorm(x, weight), cos, sin)``, in one reading.

    Args:
        x: (..., S, N, D) BF16, FP16 or FP32; N heads, D at most 256. Any strides; read in place where the last axis is dense and
            the batch axes have one stride, so also a part of a fused (..., S, 3 N D) projection.
        weight: (D,) in the dtype of x, shared by the heads.
        cos, sin: (S, R) FP32, shared by the batch, or (..., S, R); R even, at most D. Constants: no gradient reaches them.
            ``samebits.rope_3axis_tables`` makes them from position ids.
        eps: finite, at least 2^-126.
        contract: ``"torch"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., S, N, D) in the dtype of x, contiguous, with every rounding of the two steps: on a GPU the bits of the model's own
        operations where D is a multiple of 4. Differentiable once, with the bits of the two backwards; only rstd is saved.

    Raises:
        TypeError: a dtype is not one of the above, those of x and weight differ, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: diffusers' ``MiniMaxH3AttnProcessor``.
    """
    angles = angles_of("qk_norm_rope", x, cos, sin)
    y, _ = _OP.forward(x, weight, *angles, eps=eps, contract=contract, backend=backend)
    return y


def qk_norm_rope_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    eps: float = 1e-5,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The explicit backward of :func:`qk_norm_rope`.

    Args:
        grad_y: (..., N, D), in the dtype of x.
        x, weight, eps: as in the forward.
        cos, sin: (..., R) FP32, with the batch axes of x.
        rstd: (..., N) FP32, as ``torch.ops.samebits.qk_norm_rope`` returned it; it is never recomputed.
        grad_dtype: dtype of both gradients, ``torch.float32`` or that of x (one rounding).
        wanted: which of (grad_x, grad_weight) to compute; the others are None.

    Returns:
        grad_x (..., N, D) and grad_weight (D,).
    """
    grad_x, grad_weight = _OP.backward(
        grad_y, x, weight, cos, sin, rstd,
        eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_x, grad_weight
