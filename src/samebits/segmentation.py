"""Which positions use which row of a table, sorted once per layout: what gradients of table rows are summed by.

Position p of a packed sequence reads row ``index[p]`` of a table (the modulation of its timestep and modality). The gradient
of a row sums over its positions, ascending. :class:`Segments` holds that order, so that fifty blocks with two norms and two
gates each need not sort the same index again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

TILE = 256
"""Positions of one table row that one left fold takes before its sum is a partial."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A snapshot of an index and its sorted order. Made by :func:`segments`; later changes of the caller's tensor do not show.

    ``index`` (T,): the table row of each position. ``order`` (T,): positions by table row, ascending within a row. ``bounds``
    (R, 2): for each table row its first sorted position and its first tile of 256 positions. All int64, on one device.
    """

    index: Tensor
    order: Tensor
    bounds: Tensor
    batched: tuple[Tensor, Tensor] | None = None
    """index and order as (batch, S): views that each call on such rows would make anew."""

    @property
    def num_rows(self) -> int:
        """Rows of the table, R."""
        return self.bounds.shape[0]


def segments(index: Tensor, num_rows: int, batch: int = 1) -> Segments:
    """Sort the positions of a layout by the table row they use.

    Args:
        index: (S,) int64, values 0 .. ``num_rows`` - 1. It is copied and checked here, which waits for the device once.
        num_rows: rows of the table, at least 1.
        batch: how often the index repeats: positions are numbered b * S + s, as the rows of a (batch, S, H) tensor.

    Returns:
        Segments of batch * S positions, to be passed as ``index=`` wherever this layout is used.

    Raises:
        TypeError: not an int64 tensor, or a count that is no integer.
        ValueError: not one axis, or a count below 1.
        IndexError: a value outside the table.
    """
    if not isinstance(index, Tensor):
        raise TypeError(f"segments: index must be a torch.Tensor, not {type(index).__name__}")
    if index.dtype != torch.int64:
        raise TypeError(f"segments: index has dtype {index.dtype}, expected torch.int64; cast it explicitly")
    for name, count in (("num_rows", num_rows), ("batch", batch)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"segments: {name} must be an integer, not {count!r}")
        if count < 1:
            raise ValueError(f"segments: {name} must be at least 1, got {count}")
    if index.dim() != 1:
        raise ValueError(f"segments: index has shape {tuple(index.shape)}, expected (S,)")
    return _made(index, num_rows, batch)


def _made(index: Tensor, num_rows: int, batch: int) -> Segments:
    positions = index.detach().repeat(batch)
    refuse_outside(positions, num_rows, "segments: index")
    order, bounds = sorted_positions(positions, num_rows)
    rows = (batch, index.shape[0])
    return Segments(positions, order, bounds, (positions.view(rows), order.view(rows)))


def refuse_outside(index: Tensor, limit: int, what: str) -> None:
    """IndexError where a value is outside 0 .. ``limit`` - 1, naming the first one. Waits for the device."""
    if index.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.stack(index.aminmax()).tolist())
    if least < 0 or most >= limit:
        outside = (index < 0) | (index >= limit)
        at = int(outside.flatten().to(torch.uint8).argmax())
        value = int(index.flatten()[at])
        raise IndexError(f"{what} is {value} at position {at}, outside 0 .. {limit - 1}")


def sorted_positions(index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(order, bounds) of :class:`Segments` for an index (T,). Waits for nothing, so it may be captured in a CUDA graph.

    Values are not checked: what lies outside the table gives an order and bounds that contradict each other, which every
    reader of them refuses.
    """
    ordered, order = torch.sort(index, stable=True)
    rows = torch.arange(num_rows, dtype=torch.int64, device=index.device)
    first = torch.searchsorted(ordered, rows)
    count = torch.diff(first, append=first.new_full((1,), index.shape[0]))
    tiles = torch.div(count + (TILE - 1), TILE, rounding_mode="floor")
    return order, torch.stack([first, tiles.cumsum(0) - tiles], dim=1)


def most_tiles(positions: int, num_rows: int) -> int:
    """The most tiles that this many positions can fall into, however they are distributed over the rows."""
    return (positions + (TILE - 1) * min(positions, num_rows)) // TILE


# --- what the public functions use ------------------------------------------------------------------------------------

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By index tensor: its version, and the Segments made of it for each number of table rows and each batch."""
_knowing = threading.Lock()


def located(
    what: str, index: Tensor | Segments, num_rows: int, lead: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(index, order, bounds) for rows with the batch axes ``lead``: the first two with those axes, the last (R, 2).

    ``index`` is a :class:`Segments`, or a tensor (S,) or ``lead``, whose Segments are remembered for as long as the tensor
    lives and is not written. The index itself is always the tensor as it is now: a write that torch does not count (through
    ``.data``, by the replay of a graph) makes it contradict what was remembered, which a backward refuses. Under
    ``torch.compile``, CUDA-graph capture and for tensors without a version nothing can be remembered and no value seen: there
    order and bounds are None, and the backend computes them and checks the values.

    Raises TypeError, ValueError and IndexError as :func:`segments`, with ``what`` (the caller's name) in front.
    """
    shape = tuple(lead)
    if isinstance(index, Segments):
        if index.num_rows != num_rows:
            raise ValueError(f"{what}: index is for a table of {index.num_rows} rows, but the table has {num_rows}")
        if index.batched is not None and index.batched[0].shape == shape:
            return *index.batched, index.bounds
        if index.index.numel() != _product(shape):
            raise ValueError(
                f"{what}: index has {index.index.numel()} positions, but the batch axes are {shape}; "
                "samebits.segments(index, num_rows, batch) repeats it over a batch"
            )
        if len(shape) == 1:  # as they are: making a view costs as much as a check
            return index.index, index.order, index.bounds
        return index.index.view(shape), index.order.view(shape), index.bounds
    if not isinstance(index, Tensor):
        raise TypeError(f"{what}: index must be a torch.Tensor or samebits.Segments, not {type(index).__name__}")
    if index.dtype != torch.int64:
        raise TypeError(f"{what}: index has dtype {index.dtype}, expected torch.int64; cast it explicitly")
    repeats = index.dim() == 1 and len(shape) > 1
    if tuple(index.shape) != (shape[-1:] if repeats else shape):
        wanted = f"{shape} or {shape[-1:]}" if len(shape) > 1 else f"{shape}"
        raise ValueError(f"{what}: index has shape {tuple(index.shape)}, expected {wanted}")
    here = index if tuple(index.shape) == shape else index.expand(shape).contiguous()
    if not _can_be_seen(index):
        return here, None, None
    batch = _product(shape[:-1]) if repeats else 1
    if index.is_inference() or _product(shape) == 0:
        made = _checked(what, index, num_rows, batch)
    else:
        made = _remembered(what, index, num_rows, batch)
    return here, made.order.view(shape), made.bounds


def located_in(
    what: str, index: Tensor | Segments, rows: tuple[str, Tensor], table: tuple[str, Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As :func:`located`, for a tensor (..., S, H) and a table (R, H), each with the name that a message calls it by."""
    for (name, tensor), most, form in ((rows, None, "(..., S, H)"), (table, 2, "(R, H)")):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dim() < 2 or (most is not None and tensor.dim() > most):
            raise ValueError(f"{what}: {name} has shape {tuple(tensor.shape)}, expected {form}")
    return located(what, index, table[1].shape[0], rows[1].shape[:-1])


def _remembered(what: str, index: Tensor, num_rows: int, batch: int) -> Segments:
    key = (num_rows, batch)
    with _knowing:
        version, made = _known.get(index, (None, {}))
        if version == index._version and key in made:
            found: Segments = made[key]
            return found
    fresh = _checked(what, index, num_rows, batch)
    with _knowing:
        version, made = _known.get(index, (None, {}))
        _known[index] = (index._version, (made if version == index._version else {}) | {key: fresh})
    return fresh


def _checked(what: str, index: Tensor, num_rows: int, batch: int) -> Segments:
    refuse_outside(index, num_rows, f"{what}: index")
    positions = index.detach().reshape(-1).repeat(batch)
    return Segments(positions, *sorted_positions(positions, num_rows))


def _can_be_seen(index: Tensor) -> bool:
    if torch.compiler.is_compiling() or index.device.type == "meta" or type(index) is not Tensor:
        return False  # a subclass may have no values, as those that only trace
    return not (index.is_cuda and torch.cuda.is_current_stream_capturing())


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
