"""Public functions of ``hyper_head``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("hyper_head")


def hyper_head(
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Collapse the residual streams behind the last layer of a hyper-connected model.

    With x the flattened streams: proj = x @ weight^T, r = 1 / rms(x), pre = sigmoid(((r * proj) * gain) + bias) + 1e-6;
    hidden = sum_i pre[i] * residual[i]. The final norm is a separate operator.

    Args:
        residual: (..., 4, D) BF16, the streams. Any strides; read in place where the last axis is dense.
        weight: (4, 4 D) FP32, the controller; stream i owns the columns i D to (i + 1) D.
        gain: (4,) FP32 (a model has one number, repeated four times).
        bias: (4,) FP32.
        eps: of the RMS, finite, at least 2^-126.
        contract: ``"ascending"`` (default), ``"ascending-dsv4"``, ``"fast"`` or ``"fast-dsv4"``, as in ``mhc_pre``.
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        hidden: (..., D) BF16, contiguous. Differentiable once in all four inputs; the gradient of ``residual`` is BF16, the
        others FP32, folded over rows.

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: DeepSeek-V4 inference code, in the arithmetic of ``mhc_pre``.
    """
    hidden, *_ = _OP.forward(residual, weight, gain, bias, eps=eps, contract=contract, backend=backend)
    return hidden


def hyper_head_backward(
    grad_hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    pre: Tensor,
    logits: Tensor,
    proj: Tensor,
    r: Tensor,
    q: Tensor,
    start_weight: Tensor | None = None,
    start_gain: Tensor | None = None,
    start_bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`hyper_head`.

    Args:
        grad_hidden: (..., D) BF16 or FP32.
        residual, weight, gain, eps: as in the forward.
        pre, logits, proj, r, q: as ``torch.ops.samebits.hyper_head`` returned them; never recomputed.
        start_weight, start_gain, start_bias: FP32, where the folds over the rows start; None: +0.
        grad_dtype: dtype of the gradient of ``residual``, ``torch.float32`` or ``torch.bfloat16`` (one rounding).
        wanted: which of (grad_residual, grad_weight, grad_gain, grad_bias) to compute; the others are None.

    Returns:
        grad_residual (..., 4, D), grad_weight (4, 4 D), grad_gain (4,) and grad_bias (4,), the last three FP32.
    """
    grad_residual, grad_weight, grad_gain, grad_bias = _OP.backward(
        grad_hidden, residual, weight, gain, pre, logits, proj, r, q, start_weight, start_gain, start_bias,
        eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_residual, grad_weight, grad_gain, grad_bias
