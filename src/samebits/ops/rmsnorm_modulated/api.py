"""Public functions of ``rmsnorm_modulated``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator
from samebits.segmentation import Segments, located_in

_OP = operator("rmsnorm_modulated")


def rmsnorm_modulated(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor | Segments,
    *,
    eps: float = 1e-5,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm, then scale and shift by the table row of each position.

    n = rd(weight * (rstd * x)), y = rd(rd(n * rd(1 + scale[i])) + shift[i]), i = index[s], rstd = rsqrt(mean(x^2) + eps); rd is
    one rounding to the dtype of x.

    Args:
        x: (..., S, H) BF16, FP16 or FP32. Any strides; read in place where the last axis is dense.
        weight: (H,) in the dtype of x.
        shift, scale: (R, H) in the dtype of x; any row stride, so chunks of a wider table are read in place.
        index: the table row of each position: int64 (S,), shared by the batch, or (..., S), or ``samebits.segments(...)``, which
            saves the check of its values and the sort that the backward needs. A plain tensor is checked and sorted once, and
            again after it was written by torch. Under ``torch.compile`` and CUDA-graph capture nothing waits for the values:
            a wrong one is a device-side assertion.
        eps: finite, at least 2^-126.
        contract: ``"torch"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., S, H) in the dtype of x, contiguous: on a GPU the bits of ``torch.nn.functional.rms_norm`` (where that takes its
        fused vectorised kernel) followed by the model's element-wise operations. Differentiable once. The gradients of shift and
        scale are FP32 sums over the positions of each row in a fixed order, rounded once at the leaf.

    Raises:
        TypeError: a dtype is not one of the above, they differ, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.
        IndexError: an index outside 0 .. R - 1.

    Source: diffusers' ``MiniMaxH3TransformerBlock`` and ``MiniMaxH3AdaLayerNormContinuous``.
    """
    positions = located_in("rmsnorm_modulated", index, ("x", x), ("scale", scale))
    y, _ = _OP.forward(x, weight, shift, scale, *positions, eps=eps, contract=contract, backend=backend)
    return y


def rmsnorm_modulated_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    index: Tensor,
    order: Tensor | None,
    bounds: Tensor | None,
    rstd: Tensor,
    eps: float = 1e-5,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`rmsnorm_modulated`. It waits for no value; a wrong index is an assertion of the device.

    Args:
        grad_y: (..., S, H), in the dtype of x.
        x, weight, scale, eps: as in the forward.
        index, order: (..., S) int64 and ``bounds`` (R, 2), as ``samebits.Segments`` holds them for the positions of the whole
            batch. order and bounds may be None: then they are computed here.
        rstd: (..., S) FP32, as ``torch.ops.samebits.rmsnorm_modulated`` returned it; it is never recomputed.
        grad_dtype: dtype of grad_x and grad_weight, ``torch.float32`` or that of x (one rounding).
        wanted: which of (grad_x, grad_weight, grad_shift, grad_scale) to compute; the others are None.

    Returns:
        grad_x (..., S, H), grad_weight (H,), grad_shift and grad_scale (R, H) FP32.
    """
    grad_x, grad_weight, grad_shift, grad_scale = _OP.backward(
        grad_y, x, weight, scale, index, order, bounds, rstd,
        eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_x, grad_weight, grad_shift, grad_scale
