"""Public functions of ``mhc_pre``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("mhc_pre")


def mhc_pre(
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything in front of a sublayer of a hyper-connected layer.

    With x the flattened streams: proj = x @ weight^T, r = 1 / rms(x), logits = ((r * proj) * gain) + bias; these are split
    into pre = sigmoid + 1e-6, post = 2 sigmoid and comb by 20 Sinkhorn rounds; hidden = sum_i pre[i] * residual[i].

    Args:
        residual: (..., 4, D) BF16, the streams. Any strides; read in place where the last axis is dense.
        weight: (24, 4 D) FP32, the controller; stream i owns the columns i D to (i + 1) D.
        gain: (24,) FP32: the gain of each logit (a model has one number for each of the three groups, repeated 4, 4, 16 times).
        bias: (24,) FP32.
        eps: of the RMS, finite, at least 2^-126.
        contract: ``"ascending"`` (default, published), ``"ascending-dsv4"``, ``"fast"`` or ``"fast-dsv4"``; see the README.
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        hidden (..., D) BF16, post (..., 4) FP32 and comb (..., 4, 4) FP32, all contiguous. ``mhc_post`` takes post and comb.
        Differentiable once in all four inputs; the gradient of ``residual`` is BF16, the others FP32, folded over rows.

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC (profile ``oracle-fp32-mhc-v1``), pre-mix of a sublayer.
    """
    hidden, post, comb, *_ = _OP.forward(residual, weight, gain, bias, eps=eps, contract=contract, backend=backend)
    return hidden, post, comb


def mhc_pre_backward(
    grad_hidden: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    grad_streams: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    comb: Tensor,
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
    """The explicit backward of :func:`mhc_pre`, with the residual leg of :func:`mhc_post` merged in where it is given.

    Args:
        grad_hidden: (..., D) BF16 or FP32.
        grad_post, grad_comb: (..., 4) and (..., 4, 4) FP32.
        grad_streams: (..., 4, D) BF16, the upstream gradient of the ``mhc_post`` that used ``residual`` and ``comb``: its
            gradient of ``residual`` is computed here and added last, in FP32. None: no such leg.
        residual, weight, gain, eps: as in the forward.
        comb, pre, logits, proj, r, q: as ``torch.ops.samebits.mhc_pre`` returned them; never recomputed.
        start_weight, start_gain, start_bias: FP32, where the folds over the rows start: the gradients of the rows before
            these, so that batches continue one chain. None: +0.
        grad_dtype: dtype of the gradient of ``residual``, ``torch.float32`` or ``torch.bfloat16`` (one rounding).
        wanted: which of (grad_residual, grad_weight, grad_gain, grad_bias) to compute; the others are None. A frozen
            controller wants (True, False, False, False): both legs of grad_residual stay.

    Returns:
        grad_residual (..., 4, D), grad_weight (24, 4 D), grad_gain (24,) and grad_bias (24,), the last three FP32.
    """
    grad_residual, grad_weight, grad_gain, grad_bias = _OP.backward(
        grad_hidden, grad_post, grad_comb, grad_streams, residual, weight, gain, comb, pre, logits, proj, r, q,
        start_weight, start_gain, start_bias,
        eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_residual, grad_weight, grad_gain, grad_bias
