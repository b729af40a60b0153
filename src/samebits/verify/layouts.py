"""Hostile memory layouts: views whose neighbours in memory are NaN, so that a kernel that strays is seen.

Each function takes a contiguous tensor (rows, *axes), or (*axes) for a shared one, and returns a view of other memory,
or None where the layout does not exist for that shape. ``same`` layouts keep the values; the others (overlapping rows)
have values of their own, and the expected result is that of a contiguous copy of the view.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

Layout = Callable[[Tensor], "Tensor | None"]


def poisoned(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fresh memory of the tensor's dtype, full of what must not be read: NaN, or the largest integer."""
    poison = float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max
    return torch.full(shape, poison, dtype=tensor.dtype, device=tensor.device)


def _fill(view: Tensor, tensor: Tensor) -> Tensor:
    view.copy_(tensor)
    return view


def row_slice(tensor: Tensor) -> Tensor | None:
    if tensor.dim() < 2:
        return None
    rows, *rest = tensor.shape
    return _fill(poisoned(tensor, (2 * rows, *rest))[::2], tensor)


def column_step(tensor: Tensor) -> Tensor | None:
    if tensor.dim() < 1:
        return None
    return _fill(poisoned(tensor, (*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2], tensor)


def column_window(tensor: Tensor) -> Tensor | None:
    """Rows further apart than they are long; the pitch is not a multiple of a vector."""
    if tensor.dim() < 1:
        return None
    width = tensor.shape[-1]
    return _fill(poisoned(tensor, (*tensor.shape[:-1], width + 11))[..., 8 : 8 + width], tensor)


def chunk_of_table(tensor: Tensor) -> Tensor | None:
    """One of six equal parts of a wider table, as modulation tables are stored."""
    if tensor.dim() < 1:
        return None
    return _fill(poisoned(tensor, (*tensor.shape[:-1], 6 * tensor.shape[-1])).chunk(6, -1)[2], tensor)


def transposed(tensor: Tensor) -> Tensor | None:
    if tensor.dim() < 2:
        return None
    *rest, a, b = tensor.shape
    return _fill(poisoned(tensor, (*rest, b, a)).transpose(-1, -2), tensor)


def rows_innermost(tensor: Tensor) -> Tensor | None:
    if tensor.dim() < 2:
        return None
    rows, *rest = tensor.shape
    return _fill(poisoned(tensor, (*rest, rows)).movedim(-1, 0), tensor)


def misaligned(offset: int) -> Layout:
    def view(tensor: Tensor) -> Tensor:
        flat = poisoned(tensor, (tensor.numel() + 16,))
        return _fill(flat[offset : offset + tensor.numel()].view(tensor.shape), tensor)

    return view


def expanded_rows(tensor: Tensor) -> Tensor | None:
    """Every row is the first row: row stride 0."""
    return tensor[:1].clone().expand(tensor.shape) if tensor.dim() >= 1 and tensor.shape[0] else None


def expanded_columns(tensor: Tensor) -> Tensor | None:
    return tensor[..., :1].clone().expand(tensor.shape) if tensor.dim() >= 1 and tensor.shape[-1] else None


def expanded_everywhere(tensor: Tensor) -> Tensor | None:
    """One element seen everywhere: every stride is 0."""
    if tensor.dim() < 1 or not tensor.numel():
        return None
    return tensor[(slice(0, 1),) * tensor.dim()].clone().expand(tensor.shape)


def overlapping_rows(tensor: Tensor) -> Tensor | None:
    """Each row starts one element after the one before: row stride 1, less than a row."""
    if tensor.dim() < 2 or not tensor.numel():
        return None
    rows = tensor.shape[0]
    flat = tensor.flatten()[: tensor[0].numel()].repeat(2)[: tensor[0].numel()]
    storage = torch.cat([flat, flat.flip(0)[:1].expand(rows)])
    return storage.as_strided(tensor.shape, (1, *tensor[0].contiguous().stride()))


def first_row_far_stride(tensor: Tensor) -> Tensor | None:
    """A single row whose declared row stride is beyond 32 bits; the stride is never used."""
    if tensor.dim() < 2 or tensor.shape[0] != 1:
        return None
    return tensor.as_strided(tensor.shape, (2**31, *tensor[0].contiguous().stride()))


def first_row_odd_stride(tensor: Tensor) -> Tensor | None:
    """A single row, itself aligned, of a table whose pitch is no multiple of a vector."""
    if tensor.dim() < 2 or tensor.shape[0] != 1:
        return None
    row = tensor[0].contiguous()
    pitch = row.numel() + 11
    return _fill(poisoned(tensor, (2 * pitch,)).as_strided(tensor.shape, (pitch, *row.stride())), tensor)


LAYOUTS: dict[str, Layout] = {
    "row_slice": row_slice,
    "column_step": column_step,
    "column_window": column_window,
    "chunk_of_table": chunk_of_table,
    "transposed": transposed,
    "rows_innermost": rows_innermost,
    "misaligned_1": misaligned(1),
    "misaligned_2": misaligned(2),
    "misaligned_4": misaligned(4),
    "expanded_rows": expanded_rows,
    "expanded_columns": expanded_columns,
    "expanded_everywhere": expanded_everywhere,
    "overlapping_rows": overlapping_rows,
}


def random_view(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same values in a random layout: permuted axes, steps, gaps and an offset; NaN everywhere else."""
    if tensor.dim() == 0:
        return tensor
    order = rng.sample(range(tensor.dim()), tensor.dim()) if rng.random() < 0.5 else list(range(tensor.dim()))
    steps = [rng.choice((1, 1, 1, 2, 3)) for _ in order]
    gaps = [rng.choice((0, 0, 1, 8, 16)) for _ in order]
    offset = rng.choice((0, 0, 1, 2, 8))
    shape = [tensor.shape[axis] * step + gap for axis, step, gap in zip(order, steps, gaps, strict=True)]
    count = 1
    for size in shape:
        count *= size
    flat = poisoned(tensor, (offset + count,))
    box = flat[offset:].view(shape)
    for dim, (axis, step) in enumerate(zip(order, steps, strict=True)):
        box = box.narrow(dim, 0, tensor.shape[axis] * step)
        box = box[(slice(None),) * dim + (slice(None, None, step),)]
    view = box.permute([order.index(axis) for axis in range(tensor.dim())])
    view.copy_(tensor)
    return view
