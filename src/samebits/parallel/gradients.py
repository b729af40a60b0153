"""The explicit backward of an operator whose tokens are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits import registry
from samebits.contract import OpSpec
from samebits.dispatch import UnsupportedError
from samebits.parallel.carry import carry
from samebits.parallel.order import Chunk, TokenOrder


def token_sharded_backward(
    op: str,
    chunks: Sequence[Sequence[Tensor | None]],
    order: TokenOrder,
    *,
    group: dist.ProcessGroup | None = None,
    contract: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    **scalars: Any,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Backward of ``op`` over token shards: the bytes of one rank that holds the whole batch.

    Args:
        op: name of the operator, e.g. ``"mhc_pre"``.
        chunks: for each chunk of this rank, ascending, the backward inputs in the order of the declaration. Parameters are
            the same in each; ``start_<p>`` may be given in the first chunk of the batch and continues an earlier batch.
        order: all chunks of the batch, the same on every rank.
        contract, backend, grad_dtype, scalars: as in the operator's explicit backward.

    Returns:
        For each chunk of this rank the row gradients by name (``grad_<input>``), and the parameter gradients, on every
        rank the same.

    Raises:
        UnsupportedError: a chunk has another number of rows than ``order`` says, or the contract's fold cannot be cut there.
    """
    operator = registry.operator(op)
    spec = operator.spec
    chosen = spec.contract(contract)
    mine = order.of(dist.get_rank(group))
    order.require_cuts(chosen.chain_rows, chosen.name)
    if len(chunks) != len(mine):
        raise UnsupportedError(f"{op}: the token order gives this rank {len(mine)} chunks, got {len(chunks)}")
    for tensors, chunk in zip(chunks, mine, strict=True):
        rows = _rows(spec, tensors)
        if rows != chunk.rows:
            raise UnsupportedError(f"{op}: chunk [{chunk.first}, {chunk.last}) has {rows} rows")
    results = spec.backward.results
    options: dict[str, Any] = {"contract": contract, "backend": backend, "grad_dtype": grad_dtype, **scalars}
    row_grads = []
    for tensors in chunks:
        values = operator.backward(*tensors, wanted=[r.rows for r in results], **options)
        row_grads.append({r.name: v for r, v in zip(results, values, strict=True) if v is not None})

    folded = [r for r in results if not r.rows]
    starts = [f"start_{r.name.removeprefix('grad_')}" for r in folded]
    names = [arg.name for arg in spec.backward.inputs]
    missing = [name for name in starts if name not in names]
    if missing:
        raise UnsupportedError(f"{op} cannot continue a fold over tokens: it has no {', '.join(missing)}")

    def fold(chunk: Chunk, accumulators: Sequence[Tensor] | None) -> list[Tensor]:
        tensors = list(chunks[mine.index(chunk)])
        for name, value in zip(starts, accumulators or (), strict=accumulators is not None):
            tensors[names.index(name)] = value
        values = operator.backward(*tensors, wanted=[not r.rows for r in results], **options)
        return [v for v, r in zip(values, results, strict=True) if v is not None and not r.rows]

    like = _like(spec, folded, chunks[0])
    ends = carry(order, fold, like, group)
    return row_grads, {r.name: value for r, value in zip(folded, ends, strict=True)}


def _rows(spec: OpSpec, tensors: Sequence[Tensor | None]) -> int:
    arg, tensor = next(
        (a, t)
        for a, t in zip(spec.backward.inputs, tensors, strict=True)
        if a.rows and not a.optional and t is not None
    )
    return tensor.shape[: tensor.dim() - len(arg.axes)].numel()


def _like(spec: OpSpec, folded: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Empty accumulators, shaped by the inputs of a chunk."""
    sizes: dict[str, int] = {}
    for arg, tensor in zip(spec.backward.inputs, tensors, strict=True):
        if tensor is not None:
            sizes |= dict(zip(arg.axes, tensor.shape[tensor.dim() - len(arg.axes) :], strict=True))
    device = next(t for t in tensors if t is not None).device
    return [torch.empty([sizes[axis] for axis in r.axes], dtype=torch.float32, device=device) for r in folded]
