"""Sums over the positions of table rows: the order, spelled out one addition at a time, and metadata that is refused."""

from __future__ import annotations

import pytest
import torch
from ops.segment_faults import FAULTS, broken
from torch import Tensor

from samebits.exact.segment_sums import (
    check_index,
    check_segments,
    segment_sums,
    sum_of_all,
    tile_sums,
    tile_sums_in_order,
)
from samebits.segmentation import sorted_positions
from samebits.verify import inputs


def _terms(count: int) -> Tensor:
    drawn = inputs.row_tensor("segment-test", range(count), (3,), torch.float32)
    return drawn * drawn.abs()  # so that every addition rounds


def _index(count: int, rows: int) -> Tensor:
    return inputs.index_tensor("segment-test/index", range(count), rows, torch.int64)


def _fold(terms: list[Tensor]) -> Tensor:
    acc = torch.zeros(3)
    for term in terms:
        acc = acc + term
    return acc


def _tiles(positions: Tensor, terms: Tensor) -> list[Tensor]:
    return [_fold(list(terms[tile])) for tile in positions.split(256)] if len(positions) else []


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (40, 136), (700, 3), (1500, 2)])
def test_the_order_is_that_of_the_contract(count: int, rows: int) -> None:
    terms, index = _terms(count), _index(count, rows)
    order, bounds = sorted_positions(index, rows)
    by_row = [_tiles((index == row).nonzero().flatten(), terms) for row in range(rows)]
    got = segment_sums(terms, order, bounds)
    assert torch.equal(torch.stack([_fold(tiles) for tiles in by_row]), got)
    everything = [tile for tiles in by_row for tile in tiles]
    assert torch.equal(_fold(everything), sum_of_all(tile_sums(terms, order, bounds)))
    plain = _tiles(torch.arange(count), terms)
    assert torch.equal(_fold(plain), sum_of_all(tile_sums_in_order(terms)))
    if count > 256 * rows:  # so a fold without tiles would have been seen
        assert not torch.equal(torch.stack([_fold(list(terms[index == row])) for row in range(rows)]), got)


def test_rows_without_positions_give_plus_zero() -> None:
    order, bounds = sorted_positions(torch.tensor([1, 1]), 3)
    got = segment_sums(torch.full((2, 3), -0.0), order, bounds)
    assert not got.any() and not got.signbit().any()


def test_a_row_depends_on_its_own_positions_alone() -> None:
    terms, index = _terms(900), _index(900, 4)
    full = segment_sums(terms, *sorted_positions(index, 4))
    others = torch.where((index == 2)[:, None], terms, torch.full_like(terms, float("nan")))
    assert torch.equal(full[2], segment_sums(others, *sorted_positions(index, 4))[2])
    kept = index == 2
    alone = segment_sums(terms[kept], *sorted_positions(index[kept], 4))
    assert torch.equal(full[2], alone[2])


@pytest.mark.parametrize("value", [-1, 3, 2**63 - 1, -(2**63)])
def test_an_index_outside_is_refused(value: int) -> None:
    with pytest.raises(IndexError, match=rf"x is {value} at position 1, outside 0 \.\. 2"):
        check_index(torch.tensor([0, value]), 3, "x")


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_that_is_not_of_the_index_is_refused(fault: str) -> None:
    with pytest.raises(IndexError, match="op: "):
        check_segments(*broken(fault), "op")
