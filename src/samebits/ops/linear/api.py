"""Public functions of ``linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("linear")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    contract: str | None = None,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight^T + bias: FP32 sums, the bias added in FP32, one rounding to the dtype of x or none.

    Args:
        x: (..., K) BF16 or FP16. Any strides; read in place where the last axis is dense.
        weight: (N, K) in the dtype of x.
        bias: (N,) in the dtype of x, or None.
        contract: ``"kchain"`` (default): a single tensor-core chain over ascending K per output; see the README.
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.
        out_dtype: ``torch.float32`` for the sums as they are, without the last rounding; None, or the dtype of x, for that.

    Returns:
        (..., N) in the dtype of x or FP32, contiguous. Differentiable once: gradients are FP32 sums in a fixed order, rounded
        once to the dtype of their leaf. An upstream gradient in FP32 is first rounded once to the dtype of x: these are the
        gradients of a y in that dtype with a cast behind it.

    Raises:
        TypeError: a dtype is not one of the above, they differ, or an argument is not a tensor.
        ValueError: shapes or devices are not accepted, or no backend of that name accepts the call.

    Source: ``torch.nn.functional.linear``.
    """
    (y,) = _OP.forward(x, weight, bias, contract=contract, backend=backend, out_dtype=out_dtype)
    return y


def linear_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    start_weight: Tensor | None = None,
    start_bias: Tensor | None = None,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`linear`.

    Args:
        grad_y: (..., N), in the dtype of x.
        x, weight: as in the forward.
        start_weight: (N, K) FP32, where the chain of grad_weight starts: the grad_weight of the rows before these, so that
            batches continue one chain and give the bytes of a single batch where every batch but the last is a multiple of
            16 rows. None: +0.
        start_bias: (N,) FP32, where the fold of grad_bias starts. None: +0.
        grad_dtype: dtype of grad_x and grad_weight, ``torch.float32`` or that of x (one rounding).
        wanted: which of (grad_x, grad_weight, grad_bias) to compute; the others are None.

    Returns:
        grad_x (..., K), grad_weight (N, K), grad_bias (N,) FP32.
    """
    grad_x, grad_weight, grad_bias = _OP.backward(
        grad_y, x, weight, start_weight, start_bias,
        contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias
