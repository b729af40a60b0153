"""Public functions of ``hc_split_sinkhorn``."""

from __future__ import annotations

from torch import Tensor

from samebits.registry import operator

_OP = operator("hc_split_sinkhorn")


def hc_split_sinkhorn(
    logits: Tensor, *, contract: str | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixing weights of a hyper-connection with four streams, from the outputs of its controller.

    pre = sigmoid(logits[0:4]) + 1e-6; post = 2 sigmoid(logits[4:8]); comb = softmax over j of logits[8:24] + 1e-6, then 20
    column and 19 row normalisations in turn, each dividing by (sum + 1e-6). One FP32 rounding per operation.

    Args:
        logits: (..., 24) FP32. Any strides; read in place where the last axis is dense.
        contract: ``"ascending"`` (default, published).
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        pre (..., 4), post (..., 4) and comb (..., 4, 4), FP32, contiguous. comb[i, j] leads from source stream i to
        destination stream j: its columns sum to 1, and a mix of streams contracts its first index. Differentiable once.

    Raises:
        TypeError: logits are not FP32, or not a tensor.
        ValueError: the last axis is not 24 wide, or no backend of that name accepts the call.

    Source: DeepSeek-V4 mHC, split and Sinkhorn (profile ``oracle-fp32-mhc-v1``).
    """
    pre, post, comb = _OP.forward(logits, contract=contract, backend=backend)
    return pre, post, comb


def hc_split_sinkhorn_backward(
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    logits: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """The explicit backward of :func:`hc_split_sinkhorn`: one vector-Jacobian product per step, in reverse.

    Args:
        grad_pre, grad_post: (..., 4) FP32.
        grad_comb: (..., 4, 4) FP32.
        logits: as in the forward; everything else is recomputed from them.

    Returns:
        grad_logits (..., 24) FP32.
    """
    (grad_logits,) = _OP.backward(grad_pre, grad_post, grad_comb, logits, contract=contract, backend=backend)
    assert grad_logits is not None
    return grad_logits
