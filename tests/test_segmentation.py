"""Positions sorted by table row: what is built, what is remembered, what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import samebits
from samebits import segmentation
from samebits.exact.segment_sums import check_segments
from samebits.segmentation import Segments, located, located_in, most_tiles, sorted_positions


def test_a_small_layout_by_hand() -> None:
    made = samebits.segments(torch.tensor([2, 0, 2, 2, 0]), 4)
    assert made.index.tolist() == [2, 0, 2, 2, 0]
    assert made.order.tolist() == [1, 4, 0, 2, 3]
    assert made.bounds.tolist() == [[0, 0], [2, 1], [2, 1], [5, 2]]  # row 1 and row 3 have no positions
    assert made.num_rows == 4


def test_a_row_with_many_positions_has_many_tiles() -> None:
    made = samebits.segments(torch.tensor([1] * 513 + [0] * 256 + [3]), 4)
    assert made.bounds.tolist() == [[0, 0], [256, 1], [769, 4], [769, 4]]
    assert most_tiles(770, 4) >= 5
    check_segments(made.index, made.order, made.bounds, "test")


@pytest.mark.parametrize("positions", [0, 1, 255, 256, 257, 3000])
@pytest.mark.parametrize("rows", [1, 2, 9, 700])
def test_the_bound_on_tiles_holds(positions: int, rows: int) -> None:
    worst = [1] * min(positions, rows)  # as many started tiles as there can be, the rest in the first row
    if worst:
        worst[0] += positions - len(worst)
    for counts in (worst, [positions // rows + (r < positions % rows) for r in range(rows)]):
        assert sum(-(-count // 256) for count in counts) <= most_tiles(positions, rows)


def test_a_batch_repeats_the_index() -> None:
    once, twice = torch.tensor([1, 0, 1]), samebits.segments(torch.tensor([1, 0, 1]), 2, batch=2)
    assert twice.index.tolist() == once.repeat(2).tolist()
    assert twice.order.tolist() == [1, 4, 0, 2, 3, 5]  # position b * S + s


def test_segments_are_a_snapshot() -> None:
    index = torch.tensor([1, 0, 1])
    made = samebits.segments(index, 2)
    index.fill_(0)
    assert made.index.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([0, 1], 2), TypeError, "must be a torch.Tensor, not list"),
        ((torch.tensor([0, 1], dtype=torch.int32), 2), TypeError, "torch.int32, expected torch.int64"),
        ((torch.tensor([0, 1]), 2.0), TypeError, "num_rows must be an integer"),
        ((torch.tensor([0, 1]), True), TypeError, "num_rows must be an integer"),
        ((torch.tensor([0, 1]), 0), ValueError, "num_rows must be at least 1, got 0"),
        ((torch.tensor([0, 1]), 2, 0), ValueError, "batch must be at least 1, got 0"),
        ((torch.tensor([[0, 1]]), 2), ValueError, r"shape \(1, 2\), expected \(S,\)"),
        ((torch.tensor([0, 2, 3]), 2), IndexError, r"is 2 at position 1, outside 0 \.\. 1"),
        ((torch.tensor([0, -1]), 2), IndexError, r"is -1 at position 1, outside 0 \.\. 1"),
        ((torch.tensor([2**63 - 1]), 2), IndexError, "is 9223372036854775807"),
        ((torch.tensor([-(2**63)]), 2), IndexError, "is -9223372036854775808"),
    ],
)
def test_what_segments_refuses(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        samebits.segments(*arguments)


# --- what a public function makes of its index ------------------------------------------------------------------------


def test_a_tensor_is_sorted_once_until_it_is_written() -> None:
    index = torch.tensor([1, 0, 1])
    first = located("op", index, 2, (3,))
    assert all(a is not None and b is not None for a, b in zip(first, located("op", index, 2, (3,)), strict=True))
    assert _pointers(first) == _pointers(located("op", index, 2, (3,)))
    index[0] = 0
    second = located("op", index, 2, (3,))
    assert second[0] is index and second[1].tolist() == [0, 1, 2] and first[1].tolist() == [1, 0, 2]  # type: ignore[union-attr]


def test_another_table_or_batch_is_another_entry() -> None:
    index = torch.tensor([1, 0, 1])
    assert located("op", index, 2, (3,))[2].shape == (2, 2)  # type: ignore[union-attr]
    assert located("op", index, 5, (3,))[2].shape == (5, 2)  # type: ignore[union-attr]
    repeated = located("op", index, 2, (4, 3))
    assert repeated[0].shape == repeated[1].shape == (4, 3)  # type: ignore[union-attr]
    assert located("op", index.repeat(4).view(4, 3), 2, (4, 3))[0].tolist() == repeated[0].tolist()


def test_a_value_outside_is_refused_after_a_good_call() -> None:
    index = torch.tensor([1, 0, 1])
    located("op", index, 2, (3,))
    index[2] = 2
    with pytest.raises(IndexError, match=r"op: index is 2 at position 2, outside 0 \.\. 1"):
        located("op", index, 2, (3,))


def test_nothing_is_kept_alive() -> None:
    index = torch.tensor([1, 0, 1])
    alive = weakref.ref(located("op", index, 2, (3,))[2])
    count = len(segmentation._known)
    del index
    gc.collect()
    assert len(segmentation._known) == count - 1 and alive() is None


def test_inference_tensors_have_no_version_and_are_sorted_each_time() -> None:
    with torch.inference_mode():
        index = torch.tensor([1, 0, 1])
        first = located("op", index, 2, (3,))
        index[0] = 0
        again = located("op", index, 2, (3,))
        assert again[1].tolist() == [0, 1, 2] and first[1].tolist() == [1, 0, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("index", "lead", "error", "words"),
    [
        (torch.tensor([0, 1]), (3,), ValueError, r"shape \(2,\), expected \(3,\)"),
        (torch.tensor([0, 1]), (2, 3), ValueError, r"expected \(2, 3\) or \(3,\)"),
        (torch.tensor([[0, 1]]), (2,), ValueError, r"shape \(1, 2\), expected \(2,\)"),
        (torch.tensor([0.0, 1.0]), (2,), TypeError, "float32, expected torch.int64"),
        (7, (1,), TypeError, "must be a torch.Tensor or samebits.Segments, not int"),
        (samebits.segments(torch.tensor([0, 1]), 3), (2,), ValueError, "for a table of 3 rows, but the table has 2"),
        (samebits.segments(torch.tensor([0, 1]), 2), (2, 2), ValueError, "has 2 positions, but the batch axes are"),
    ],
)
def test_what_does_not_fit_is_refused(index: Any, lead: tuple[int, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        located("op", index, 2, lead)


def test_rows_and_table_are_named() -> None:
    index, x, table = torch.tensor([0]), torch.zeros(1, 4), torch.zeros(2, 4)
    assert located_in("op", index, ("x", x), ("scale", table))[0].tolist() == [0]
    with pytest.raises(ValueError, match=r"op: x has shape \(4,\), expected \(\.\.\., S, H\)"):
        located_in("op", index, ("x", x[0]), ("scale", table))
    with pytest.raises(ValueError, match=r"op: scale has shape \(1, 2, 4\), expected \(R, H\)"):
        located_in("op", index, ("x", x), ("scale", table[None]))
    with pytest.raises(TypeError, match=r"op: scale must be a torch\.Tensor, not list"):
        located_in("op", index, ("x", x), ("scale", []))  # type: ignore[arg-type]


def test_segments_pass_through_as_they_are() -> None:
    made = samebits.segments(torch.tensor([1, 0, 1]), 2, batch=2)
    assert isinstance(made, Segments)
    index, order, bounds = located("op", made, 2, (2, 3))
    assert order is not None and bounds is made.bounds
    assert (index.data_ptr(), order.data_ptr()) == (made.index.data_ptr(), made.order.data_ptr())


def test_the_views_of_a_batch_are_made_once() -> None:
    made = samebits.segments(torch.tensor([1, 0, 1]), 2, batch=2)
    index, order, bounds = located("here", made, 2, (2, 3))
    assert torch.equal(index, torch.tensor([[1, 0, 1], [1, 0, 1]])) and torch.equal(order, made.order.view(2, 3))
    assert made.batched is not None and bounds is made.bounds
    assert index is made.batched[0] and order is made.batched[1] and located("here", made, 2, (2, 3))[0] is index
    assert located("here", made, 2, (1, 2, 3))[0].shape == (1, 2, 3)
    assert located("here", Segments(made.index, made.order, made.bounds), 2, (2, 3))[0].shape == (2, 3)
    with pytest.raises(ValueError, match="table of 2 rows"):
        located("here", made, 3, (2, 3))
    assert samebits.segments(torch.zeros(0, dtype=torch.int64), 2, batch=2).index.numel() == 0


def test_what_has_no_values_is_left_to_the_backend() -> None:
    with FakeTensorMode():
        index, order, bounds = located("op", torch.zeros(3, dtype=torch.int64), 2, (4, 3))
    assert index.shape == (4, 3) and order is None and bounds is None
    assert located("op", torch.zeros(3, dtype=torch.int64, device="meta"), 2, (3,))[1:] == (None, None)


@pytest.mark.gpu
def test_sorting_waits_for_nothing_and_can_be_captured() -> None:
    index = torch.tensor([2, 0, 2, 2, 0] * 100, device="cuda")
    expected = sorted_positions(index, 4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sorted_positions(index, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = located("op", index, 4, (500,))
        assert captured[1:] == (None, None)
        order, bounds = sorted_positions(captured[0], 4)
    index.copy_(index.flip(0))
    graph.replay()
    assert not torch.equal(order, expected[0]) and torch.equal(bounds, expected[1])
    check_segments(index.cpu(), order.cpu(), bounds.cpu(), "captured")


def _pointers(made: tuple[Tensor, Tensor | None, Tensor | None]) -> list[int]:
    return [t.data_ptr() for t in made if t is not None]
