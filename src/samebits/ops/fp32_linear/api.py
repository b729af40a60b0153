"""Public functions of ``fp32_linear``."""

from __future__ import annotations

from torch import Tensor

from samebits.registry import operator

_OP = operator("fp32_linear")


def fp32_linear(
    x: Tensor, weight: Tensor, bias: Tensor, *, contract: str | None = None, backend: str | None = None
) -> Tensor:
    """x @ weight^T + bias in FP32: the input and output projections that MiniMax-H3 keeps in FP32.

    A row has the same bits in every batch, which cuBLAS does not give. TF32 is never used, whatever torch's switches say.

    Args:
        x: (..., K) FP32. Any strides; read in place where the last axis is dense.
        weight: (N, K) FP32.
        bias: (N,) FP32.
        contract: ``"lanes32"`` (default): the order of ``samebits.timestep_mlp``.
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., N) FP32, contiguous. Differentiable once; the gradients of weight and bias are chains over ascending rows.

    Raises:
        TypeError: an argument is not FP32 (the model keeps these layers in FP32; a cast on the way would be an error), or not a
            tensor.
        ValueError: shapes or devices are not accepted, or no backend of that name accepts the call.

    Source: ``proj_in``, ``audio_proj_in``, ``proj_out`` and ``audio_proj_out`` of MiniMax-H3 (diffusers 0.42.1).
    """
    (y,) = _OP.forward(x, weight, bias, contract=contract, backend=backend)
    return y


def fp32_linear_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`fp32_linear`.

    Args:
        grad_y: (..., N) FP32.
        x, weight: as in the forward.
        wanted: which of (grad_x, grad_weight, grad_bias) to compute; the others are None.

    Returns:
        grad_x (..., K), grad_weight (N, K) and grad_bias (N,), FP32.
    """
    grad_x, grad_weight, grad_bias = _OP.backward(grad_y, x, weight, contract=contract, backend=backend, wanted=wanted)
    return grad_x, grad_weight, grad_bias
