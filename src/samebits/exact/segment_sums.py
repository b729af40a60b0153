"""Sums over the positions of each table row, spelled out. References use them; kernels repeat them.

The order: the positions of a row ascending, cut into tiles of 256; inside a tile a left fold from +0; the partials of the
tiles of a row left-folded ascending from +0. A row without positions gives +0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.exact import fold
from samebits.segmentation import TILE, most_tiles, refuse_outside


def tile_sums(terms: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """(K, ...) partials of FP32 terms (T, ...), one for each tile; K is the most there can be, and the rest are +0."""
    positions, rows = terms.shape[0], bounds.shape[0]
    tiles = torch.arange(most_tiles(positions, rows), device=terms.device)
    first, first_tile = bounds[:, 0].contiguous(), bounds[:, 1].contiguous()
    end = torch.cat([first[1:], first.new_full((1,), positions)])
    row = torch.searchsorted(first_tile, tiles, right=True) - 1
    begin = first[row] + (tiles - first_tile[row]) * TILE
    return _folded(terms, order, begin, torch.minimum(begin + TILE, end[row]))


def tile_sums_in_order(terms: Tensor) -> Tensor:
    """As :func:`tile_sums`, of tiles of the positions as they stand: 0 .. 255, 256 .. 511, ..."""
    order = torch.arange(terms.shape[0], device=terms.device)
    begin = order[::TILE]
    return _folded(terms, order, begin, (begin + TILE).clamp(max=terms.shape[0]))


def _folded(terms: Tensor, order: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    acc = terms.new_zeros(begin.shape[0], *terms.shape[1:])
    if terms.shape[0] == 0:
        return acc
    for step in range(min(TILE, terms.shape[0])):
        position = begin + step
        inside = position < end
        term = terms[order[position.clamp(max=terms.shape[0] - 1)]]
        acc += torch.where(inside.view(-1, *[1] * (terms.dim() - 1)), term, 0.0)  # +0 changes no sum that began at +0
    return acc


def sums_over_tiles(partials: Tensor, bounds: Tensor) -> Tensor:
    """(R, ...): for each row of the table the left fold of its tiles, from the partials of :func:`tile_sums`."""
    first_tile = bounds[:, 1]
    last = torch.cat([first_tile[1:], first_tile.new_full((1,), partials.shape[0])])
    acc = partials.new_zeros(bounds.shape[0], *partials.shape[1:])
    for step in range(partials.shape[0]):
        tile = first_tile + step
        inside = tile < last
        if not partials.is_cuda and not bool(inside.any()):
            break
        term = partials[tile.clamp(max=partials.shape[0] - 1)]
        acc += torch.where(inside.view(-1, *[1] * (partials.dim() - 1)), term, 0.0)
    return acc


def segment_sums(terms: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """(R, ...) sums of FP32 terms (T, ...), each already rounded, over the positions of each row."""
    return sums_over_tiles(tile_sums(terms, order, bounds), bounds)


def sum_of_all(partials: Tensor) -> Tensor:
    """The left fold of the partials of all tiles, ascending from +0: a parameter that all positions share."""
    return fold.left_fold(partials, 0)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_index(index: Tensor, limit: int, what: str) -> None:
    """IndexError on a CPU, a device-side assertion on a GPU, where a value is outside 0 .. ``limit`` - 1."""
    if index.is_cuda:
        torch._assert_async(((index >= 0) & (index < limit)).all(), f"{what} is outside the table")
    else:
        refuse_outside(index, limit, what)


def check_segments(index: Tensor, order: Tensor, bounds: Tensor, what: str) -> None:
    """Refuse an order and bounds that are not those of the index, as :func:`check_index` refuses values.

    ``bounds`` must cut the positions into one range for each row, in order, and count the tiles of each; ``order`` must hold
    every position of a row ascending, in the range of that row. The index itself must have been checked.
    """
    positions = index.shape[0]
    first, first_tile = bounds[:, 0], bounds[:, 1]
    end = torch.cat([first[1:], first.new_full((1,), positions)])
    count = end - first
    tiles = torch.div(count + (TILE - 1), TILE, rounding_mode="floor")
    _refuse((count < 0) | (count > positions), f"{what}: bounds are not ascending from 0 to the number of positions")
    _refuse(first_tile != tiles.cumsum(0) - tiles, f"{what}: bounds do not count the tiles of 256 positions")
    _refuse(first[:1] != 0, f"{what}: bounds do not begin at 0")
    if positions == 0:
        return
    _refuse((order < 0) | (order >= positions), f"{what}: order holds what is no position")
    row = index[order.clamp(0, positions - 1)]
    place = torch.arange(positions, device=index.device)
    own = torch.searchsorted(first.contiguous(), place, right=True) - 1
    _refuse(row != own.clamp(min=0), f"{what}: order holds a position of another table row")
    descends = (order[1:] <= order[:-1]) & (row[1:] == row[:-1])
    _refuse(descends, f"{what}: order does not ascend within a table row")


def _refuse(wrong: Tensor, message: str) -> None:
    if wrong.is_cuda:
        torch._assert_async(~wrong.any(), message)
    elif bool(wrong.any()):
        at = int(wrong.to(torch.uint8).argmax())
        raise IndexError(f"{message} (first at entry {at})")
