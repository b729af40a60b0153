"""Public functions of ``adaln_projection``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator

_OP = operator("adaln_projection")


def contract_for(weight: Tensor, contract: str | None) -> str:
    """The contract that a call takes where none is named: ``fma`` for an FP32 weight, else ``kchain``."""
    if contract is not None:
        return contract
    return "fma" if isinstance(weight, Tensor) and weight.dtype == torch.float32 else "kchain"


def adaln_projection(
    temb: Tensor, weight: Tensor, bias: Tensor, *, contract: str | None = None, backend: str | None = None
) -> Tensor:
    """AdaLN table of the timesteps: silu(temb) @ weight^T + bias.

    The SiLU is computed in FP32 and rounded once to the dtype of the weight; sums are FP32; the table is rounded once.

    Args:
        temb: (..., D) FP32, one row per timestep.
        weight: (N, D) BF16, FP16 or FP32.
        bias: (N,), dtype of the weight.
        contract: ``"kchain"`` (BF16 and FP16 on Hopper's tensor cores) or ``"fma"`` (any dtype, any architecture); see the
            README. None: ``kchain``, but ``fma`` where the weight is FP32.
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        table (..., N) in the dtype of weight, contiguous. Differentiable once in everything; the gradient of temb is FP32.

    Raises:
        TypeError: temb is not FP32 (an early cast is another model), the bias has another dtype than the weight, the
            contract does not take the weight's dtype, or an argument is not a tensor.
        ValueError: shapes or devices are not accepted, or no backend of that name accepts the call.

    Source: MiniMax-H3, ``adaln_proj`` of a block and ``norm_out.linear`` (diffusers 0.42.1).
    """
    (table,) = _OP.forward(temb, weight, bias, contract=contract_for(weight, contract), backend=backend)
    return table


def adaln_projection_backward(
    grad_table: Tensor,
    temb: Tensor,
    weight: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The explicit backward of :func:`adaln_projection`.

    Args:
        grad_table: (..., N) FP32, BF16 or FP16; composites keep it FP32.
        temb, weight: as in the forward.
        grad_dtype: dtype of the gradient of ``weight``: FP32, or that of the weight (one rounding).
        wanted: which of (grad_temb, grad_weight, grad_bias) to compute; the others are None.

    Returns:
        grad_temb (..., D) FP32, grad_weight (N, D), grad_bias (N,) FP32. Both contracts have the same backward.
    """
    grad_temb, grad_weight, grad_bias = _OP.backward(
        grad_table, temb, weight,
        contract=contract_for(weight, contract), backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_temb, grad_weight, grad_bias
