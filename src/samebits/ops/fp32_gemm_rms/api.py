"""Public functions of ``fp32_gemm_rms``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("fp32_gemm_rms")


def fp32_gemm_rms(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, contract: str | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Controller projection of a hyper-connection, and the reciprocal RMS of its input: (x @ weight^T, 1 / rms(x)).

    ``ascending`` and ``fast``: q = sqrt(sum x^2) / sqrt(K), r = 1 / (q + eps). ``ascending-dsv4`` and ``fast-dsv4``:
    q = sum x^2 / K, r = rsqrt(q + eps). proj is not normalised; a caller multiplies it by r.

    Args:
        x: (..., K) BF16, or FP32 under the ascending contracts. Residual streams (..., 4, D) come as ``x.flatten(-2)``; a
            composite such as ``mhc_pre`` reads them in place with any stride between streams. Any strides; read in place
            where the last axis is dense.
        weight: (N, K) FP32, N at most 31.
        eps: added to the RMS (dsv4: to the mean square); finite, at least 2^-126.
        contract: ``"ascending"`` (default, published), ``"ascending-dsv4"``, ``"fast"`` or ``"fast-dsv4"``; see the README.
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        proj (..., N) and r (...), both FP32 and contiguous. Differentiable once in ``x`` (gradient in the dtype of x) and
        ``weight`` (FP32, folded over rows).

    Raises:
        TypeError: a dtype is not the one above, or an argument is not a tensor.
        ValueError: shapes, devices or eps are not accepted, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC (profile ``oracle-fp32-mhc-v1``), controller projection.
    """
    proj, r, _ = _OP.forward(x, weight, eps=eps, contract=contract, backend=backend)
    return proj, r


def fp32_gemm_rms_backward(
    grad_proj: Tensor,
    grad_r: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    q: Tensor,
    start_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The explicit backward of :func:`fp32_gemm_rms`.

    Args:
        grad_proj: (..., N) FP32.
        grad_r: (...) FP32.
        x, weight, eps: as in the forward.
        r, q: (...) FP32, as ``torch.ops.samebits.fp32_gemm_rms`` returned them; never recomputed.
        start_weight: (N, K) FP32, where the fold of grad_weight starts: the grad_weight of the rows before these, so that
            batches continue one chain and give the bytes of a single batch (``fast``: where every batch but the last is a
            multiple of 256 rows). None: +0.
        grad_dtype: dtype of the gradient of ``x``, ``torch.float32`` or ``torch.bfloat16`` (one rounding).
        wanted: which of (grad_x, grad_weight) to compute; the others are None.

    Returns:
        grad_x (..., K) and grad_weight (N, K) FP32.
    """
    grad_x, grad_weight = _OP.backward(
        grad_proj, grad_r, x, weight, r, q, start_weight,
        eps=eps, contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_x, grad_weight
