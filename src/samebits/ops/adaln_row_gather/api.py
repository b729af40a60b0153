"""Public functions of ``adaln_row_gather``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from samebits.ops.adaln_row_gather.spec import CHUNKS
from samebits.registry import operator
from samebits.segmentation import Segments, located

_OP = operator("adaln_row_gather")


class Modulation(NamedTuple):
    """The six modulations of each position, (..., H) each."""

    shift_msa: Tensor
    scale_msa: Tensor
    gate_msa: Tensor
    shift_mlp: Tensor
    scale_mlp: Tensor
    gate_mlp: Tensor


def adaln_row_gather(
    table: Tensor, index: Tensor | Segments, *, contract: str | None = None, backend: str | None = None
) -> Modulation:
    """The modulations of each position, picked from a table: six dense copies of its chunks.

    Args:
        table: (R, 6 H) or (R, 6, H) BF16, FP16 or FP32: a row for each timestep and modality, with the chunks shift, scale and
            gate of attention, then of the FFN. Any row stride; read in place where the last axis is dense.
        index: the table row of each position: int64 (...), see ``samebits.adaln_indices``, or ``samebits.segments(...)``, which
            sorts a layout once for all its uses.
        contract: ``"tiles256"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp), (..., H) each, contiguous, in the dtype of table.
        Differentiable once: the gradient of a table row is an FP32 sum over its positions in a fixed order, rounded once at the
        leaf. Results that nobody uses cost nothing in the backward.

    Raises:
        TypeError: a dtype is not one of the above, or an argument is not a tensor.
        ValueError: the table is not (R, 6 H) or (R, 6, H), devices differ, or no backend of that name accepts the call.
        IndexError: an index outside 0 .. R - 1. Values are looked at once per tensor and version, and not during graph capture
            or ``torch.compile``, where the kernel's own assertion guards.

    Source: diffusers' ``MiniMaxH3TransformerBlock``.
    """
    chunks = _in_chunks(table)
    lead = index.index.shape if isinstance(index, Segments) else getattr(index, "shape", ())
    positions = located("adaln_row_gather", index, chunks.shape[0], lead)
    return Modulation(*_OP.forward(chunks, *positions, contract=contract, backend=backend))


def adaln_row_gather_backward(
    grads: tuple[Tensor | None, ...],
    table: Tensor,
    index: Tensor,
    order: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """The explicit backward of :func:`adaln_row_gather`. It waits for no value.

    Args:
        grads: the six upstream gradients (..., H) in the dtype of table, in the order of the results; None: zeros.
        table: as in the forward; only its shape and dtype are read.
        index, order: (...) int64 and ``bounds`` (R, 2), as ``samebits.Segments`` holds them. order and bounds may be None: then
            they are computed here.

    Returns:
        grad_table in the shape of table, FP32.
    """
    if len(grads) != len(CHUNKS):
        raise ValueError(f"adaln_row_gather_backward: expected {len(CHUNKS)} gradients, got {len(grads)}")
    (grad_table,) = _OP.backward(*grads, _in_chunks(table), index, order, bounds, contract=contract, backend=backend)
    assert grad_table is not None
    return grad_table.view(table.shape)


def _in_chunks(table: Tensor) -> Tensor:
    """(R, 6, H), a view."""
    if not isinstance(table, Tensor):
        raise TypeError(f"adaln_row_gather: table must be a torch.Tensor, not {type(table).__name__}")
    count = len(CHUNKS)
    if table.dim() == 3 and table.shape[1] == count:
        return table
    if table.dim() != 2 or table.shape[1] % count or table.shape[1] == 0:
        raise ValueError(
            f"adaln_row_gather: table has shape {tuple(table.shape)}, expected (R, {count} H) or (R, {count}, H)"
        )
    return table.unflatten(1, (count, -1))
