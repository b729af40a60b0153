"""Public functions of ``timestep_mlp``."""

from __future__ import annotations

from torch import Tensor

from samebits.registry import operator

_OP = operator("timestep_mlp")


def timestep_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """The FP32 time embedder: silu(x @ w1^T + b1) @ w2^T + b2.

    A row has the same bits in every batch, which cuBLAS does not give: it takes another kernel, with another order, at one,
    two and three rows.

    Args:
        x: (..., K) FP32. Any strides; read in place where the last axis is dense.
        w1, b1: (F, K) and (F,) FP32.
        w2, b2: (D, F) and (D,) FP32.
        contract: ``"lanes32"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., D) FP32, contiguous. Differentiable once; the gradients of the parameters are chains over ascending rows.

    Raises:
        TypeError: an argument is not FP32 (the model keeps this module in FP32; a cast on the way would be an error), or not
            a tensor.
        ValueError: shapes or devices are not accepted, or no backend of that name accepts the call.

    Source: MiniMax-H3 (diffusers 0.42.1), ``time_embedder``.
    """
    y, _, _ = _OP.forward(x, w1, b1, w2, b2, contract=contract, backend=backend)
    return y


def timestep_mlp_backward(
    grad_y: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    pre: Tensor,
    act: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    wanted: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`timestep_mlp`.

    Args:
        grad_y: (..., D) FP32.
        x, w1, w2: as in the forward.
        pre, act: (..., F) FP32, the first layer before and behind its SiLU, as ``torch.ops.samebits.timestep_mlp`` returned
            them; they are never recomputed.
        wanted: which of (grad_x, grad_w1, grad_b1, grad_w2, grad_b2) to compute; the others are None.

    Returns:
        grad_x (..., K), grad_w1 (F, K), grad_b1 (F,), grad_w2 (D, F) and grad_b2 (D,), FP32.
    """
    grad_x, grad_w1, grad_b1, grad_w2, grad_b2 = _OP.backward(
        grad_y, x, w1, w2, pre, act, contract=contract, backend=backend, wanted=wanted
    )
    return grad_x, grad_w1, grad_b1, grad_w2, grad_b2
