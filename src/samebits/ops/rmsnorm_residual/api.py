"""Public functions of ``rmsnorm_residual``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("rmsnorm_residual")


def rmsnorm_residual(
    x: Tensor, gamma: Tensor, eps: float = 1e-6, *, contract: str | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm and a copy of its input: y = bf16((x * rsqrt(mean(x^2) + eps)) * gamma), residual = x.

    Args:
        x: (..., D) BF16. Any strides; read in place where the last axis is dense.
        gamma: (D,) FP32, never rounded.
        eps: finite, at least 2^-126.
        contract: ``"ascending"`` (default, published) or ``"tree512"`` (fast for few rows; other bits).
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        y and residual, both (..., D) BF16, contiguous; residual never aliases x. Differentiable once: ``x.grad`` is
        BF16 (one rounding of the FP32 gradient of both legs), ``gamma.grad`` FP32, folded over ascending rows.

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC, norm with residual fork (profile ``oracle-fp32-mhc-v1``).
    """
    y, residual, _ = _OP.forward(x, gamma, eps=eps, contract=contract, backend=backend)
    return y, residual


def rmsnorm_residual_backward(
    grad_y: Tensor,
    grad_residual: Tensor | None,
    x: Tensor,
    gamma: Tensor,
    rstd: Tensor,
    start_gamma: Tensor | None = None,
    eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The explicit backward of :func:`rmsnorm_residual`.

    Args:
        grad_y: (..., D) BF16.
        grad_residual: (..., D) BF16, or None for zeros.
        x, gamma, eps: as in the forward.
        rstd: (...) FP32, as ``torch.ops.samebits.rmsnorm_residual`` returned it; it is never recomputed.
        start_gamma: (D,) FP32, where the fold of grad_gamma starts: the grad_gamma of the rows before these, so that
            batches continue one chain and give the bytes of a single batch. None: +0.
        grad_dtype: dtype of the gradient of ``x``, ``torch.float32`` or ``torch.bfloat16`` (one rounding).
        wanted: which of (grad_x, grad_gamma) to compute; the others are None.

    Returns:
        grad_x (..., D) and grad_gamma (D,) FP32.
    """
    grad_x, grad_gamma = _OP.backward(
        grad_y, grad_residual, x, gamma, rstd, start_gamma,
        eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_x, grad_gamma
