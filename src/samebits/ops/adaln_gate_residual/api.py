"""Public functions of ``adaln_gate_residual``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.registry import operator
from samebits.segmentation import Segments, located_in

_OP = operator("adaln_gate_residual")


def adaln_gate_residual(
    residual: Tensor,
    y: Tensor,
    gate: Tensor,
    index: Tensor | Segments,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Gated residual addition: rd(residual + rd(gate[i] * y)), i = index[s], rd one rounding to the dtype of residual.

    Args:
        residual: (..., S, H) BF16, FP16 or FP32. Any strides; read in place where the last axis is dense.
        y: (..., S, H), the output of the sublayer, in the dtype of residual.
        gate: (R, H) in the dtype of residual; any row stride, so a chunk of a wider table is read in place.
        index: the table row of each position: int64 (S,), shared by the batch, or (..., S), or ``samebits.segments(...)``, as
            for ``samebits.rmsnorm_modulated``.
        contract: ``"torch"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (..., S, H) in the dtype of residual, contiguous: the bits of the model's own operations on any machine. Differentiable
        once: the gradient of residual is the upstream one itself; that of y is one product; that of gate is an FP32 sum over
        the positions of each row in a fixed order, rounded once at the leaf.

    Raises:
        TypeError: a dtype is not one of the above, they differ, or an argument is not a tensor.
        ValueError: shapes or devices are not accepted, or no backend of that name accepts the call.
        IndexError: an index outside 0 .. R - 1.

    Source: diffusers' ``MiniMaxH3TransformerBlock``.
    """
    positions = located_in("adaln_gate_residual", index, ("residual", residual), ("gate", gate))
    (out,) = _OP.forward(residual, y, gate, *positions, contract=contract, backend=backend)
    return out


def adaln_gate_residual_backward(
    grad_out: Tensor,
    y: Tensor,
    gate: Tensor,
    index: Tensor,
    order: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The explicit backward of :func:`adaln_gate_residual`; the gradient of residual is grad_out. It waits for no value.

    Args:
        grad_out: (..., S, H), in the dtype of y.
        y, gate: as in the forward.
        index, order: (..., S) int64 and ``bounds`` (R, 2), as ``samebits.Segments`` holds them for the positions of the whole
            batch. order and bounds may be None: then they are computed here.
        grad_dtype: dtype of grad_y, ``torch.float32`` or that of y (one rounding).
        wanted: which of (grad_y, grad_gate) to compute; the others are None.

    Returns:
        grad_y (..., S, H) and grad_gate (R, H) FP32.
    """
    grad_y, grad_gate = _OP.backward(
        grad_out, y, gate, index, order, bounds,
        contract=contract, backend=backend, grad_dtype=grad_dtype, wanted=wanted,
    )  # fmt: skip
    return grad_y, grad_gate
