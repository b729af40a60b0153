"""Public functions of ``mhc_post``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("mhc_post")


def mhc_post(
    residual: Tensor,
    sublayer: Tensor,
    comb: Tensor,
    post: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mix the residual streams of a hyper-connection with each other and with the output of the sublayer.

    streams[..., j, d] = bf16(((c0j*r0 + c1j*r1) + (c2j*r2 + c3j*r3)) + post[j]*y), with r the residual and y the
    sublayer at column d; every product and every sum is rounded to FP32. The sum runs over the *first* index of ``comb``.

    Args:
        residual: (..., 4, D) BF16, the streams that entered the block. Any strides; read in place where the last axis is
            dense.
        sublayer: (..., D) BF16.
        comb: (..., 4, 4) FP32; comb[i, j] is the weight of old stream i in new stream j.
        post: (..., 4) FP32; post[j] is the weight of the sublayer in new stream j.
        contract: ``"ascending"`` (default, published) or ``"fast"``; they differ in the order of the gradients of ``comb``
            and ``post``.
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        streams: (..., 4, D) BF16, contiguous. Differentiable once in ``residual`` and ``sublayer`` (BF16 gradients) and in
        ``comb`` and ``post`` (FP32 gradients).

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes or devices do not fit together, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC, post mix (profile ``oracle-fp32-mhc-v1``).
    """
    (streams,) = _OP.forward(residual, sublayer, comb, post, contract=contract, backend=backend)
    return streams


def mhc_post_backward(
    grad_streams: Tensor,
    residual: Tensor,
    sublayer: Tensor,
    comb: Tensor,
    post: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`mhc_post`. What is not wanted is not computed, and what only it needs is not read.

    Args:
        grad_streams: (..., 4, D) BF16 or FP32.
        residual, sublayer, comb, post: as in the forward.
        grad_dtype: dtype of the gradients of ``residual`` and ``sublayer``, ``torch.float32`` or ``torch.bfloat16`` (one
            rounding).
        wanted: which of (grad_residual, grad_sublayer, grad_comb, grad_post) to compute; the others are None.

    Returns:
        grad_residual (..., 4, D), grad_sublayer (..., D), grad_comb (..., 4, 4) FP32 and grad_post (..., 4) FP32.
    """
    grad_residual, grad_sublayer, grad_comb, grad_post = _OP.backward(
        grad_streams,
        residual,
        sublayer,
        comb,
        post,
        contract=contract,
        backend=backend,
        grad_dtype=grad_dtype,
        wanted=wanted,
    )
    return grad_residual, grad_sublayer, grad_comb, grad_post
