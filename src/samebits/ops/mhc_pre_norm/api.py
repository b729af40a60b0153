"""Public functions of ``mhc_pre_norm``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("mhc_pre_norm")


def mhc_pre_norm(
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    gamma: Tensor,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`mhc_pre` and the RMSNorm behind it in one call, byte for byte what the two calls give.

    Args:
        residual: (..., 4, D) BF16, the streams. Any strides; read in place where the last axis is dense.
        weight, gain, bias: (24, 4 D), (24,) and (24,) FP32, as in ``mhc_pre``.
        gamma: (D,) FP32, the gain of the norm, never rounded.
        eps, norm_eps: of the controller's RMS and of the norm; finite, at least 2^-126.
        contract: ``"ascending"`` (default, published), ``"ascending-dsv4"``, ``"fast"`` or ``"fast-dsv4"``. The norm inside
            is that of ``rmsnorm_residual``: ``"ascending"`` in the first two, ``"tree512"`` in the others.
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        hidden and normalized (..., D) BF16, post (..., 4) and comb (..., 4, 4) FP32, all contiguous. ``rmsnorm_residual``
        would also return a copy of its input: that is hidden, and it is not written twice. Differentiable once in all
        inputs; the gradient of ``residual`` is BF16, the others FP32, folded over rows.

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes, devices or an eps are not accepted, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC (profile ``oracle-fp32-mhc-v1``), fusion mode fused-pre-norm.
    """
    hidden, normalized, post, comb, *_ = _OP.forward(
        residual, weight, gain, bias, gamma, eps=eps, norm_eps=norm_eps, contract=contract, backend=backend
    )
    return hidden, normalized, post, comb


def mhc_pre_norm_backward(
    grad_hidden: Tensor | None,
    grad_normalized: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    grad_streams: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    gamma: Tensor,
    hidden: Tensor,
    comb: Tensor,
    pre: Tensor,
    logits: Tensor,
    proj: Tensor,
    r: Tensor,
    q: Tensor,
    rstd: Tensor,
    start_weight: Tensor | None = None,
    start_gain: Tensor | None = None,
    start_bias: Tensor | None = None,
    start_gamma: Tensor | None = None,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`mhc_pre_norm`: that of the norm, then that of ``mhc_pre``; FP32 in between.

    Args:
        grad_hidden: (..., D) BF16, the upstream gradient of hidden itself, or None for zeros.
        grad_normalized: (..., D) BF16.
        grad_post, grad_comb: (..., 4) and (..., 4, 4) FP32.
        grad_streams: (..., 4, D) BF16 or None, as in ``mhc_pre_backward``.
        residual, weight, gain, gamma, eps, norm_eps: as in the forward.
        hidden, comb, pre, logits, proj, r, q, rstd: as ``torch.ops.samebits.mhc_pre_norm`` returned them.
        start_weight, start_gain, start_bias, start_gamma: FP32, where the folds over the rows start; None: +0.
        grad_dtype: dtype of the gradient of ``residual``, ``torch.float32`` or ``torch.bfloat16`` (one rounding).
        wanted: which of (grad_residual, grad_weight, grad_gain, grad_bias, grad_gamma) to compute; the others are None.

    Returns:
        grad_residual (..., 4, D), grad_weight (24, 4 D), grad_gain (24,), grad_bias (24,) and grad_gamma (D,), the last
        four FP32.
    """
    grads = _OP.backward(
        grad_hidden, grad_normalized, grad_post, grad_comb, grad_streams,
        residual, weight, gain, gamma, hidden, comb, pre, logits, proj, r, q, rstd,
        start_weight, start_gain, start_bias, start_gamma,
        eps=eps, norm_eps=norm_eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    grad_residual, grad_weight, grad_gain, grad_bias, grad_gamma = grads
    return grad_residual, grad_weight, grad_gain, grad_bias, grad_gamma
