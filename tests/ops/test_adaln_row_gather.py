"""``adaln_row_gather`` and ``adaln_indices``: all an operator must do, the order of the sums, the indices that are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import samebits
from samebits import adaln_indices, adaln_row_gather, adaln_row_gather_backward, registry
from samebits.exact import fold, segment_sums
from samebits.exact.bits import digest
from samebits.ops.adaln_row_gather.cuda import plans
from samebits.ops.adaln_row_gather.spec import CHUNKS
from samebits.runtime.device import H200
from samebits.runtime.sweep import calls
from samebits.segmentation import most_tiles, sorted_positions
from samebits.verify import inputs
from samebits.verify.conformance import Conformance
from samebits.verify.operators import OperatorSubject

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class TestAdalnRowGather(Conformance):
    op = "adaln_row_gather"
    held = {"R": 5}  # noqa: RUF012
    cpu_patterns = ("normal", "nan")
    batch_sizes = ((0, 1, 7, 33, 129, 300, 700), (0, 1, 33))
    odd_widths = ((1, 17, 63, 127, 129, 136), (1, 17))
    wide_widths = (2056,)
    very_wide_widths = ((4095, 16384), (1000,))
    accuracy_widths = ((1, 17, 136, 1000), (1, 136))

    def _assert_layout(
        self, subject: OperatorSubject, tensors: list[Tensor], backward: bool, change: Callable[[Tensor], Tensor | None]
    ) -> bool:
        """A forward has no row input with two axes, so a single row with a far stride does not exist; it has its own test."""
        return super()._assert_layout(subject, tensors, backward, change) or not backward


def _table(rows: int, size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return inputs.row_tensor("gather-test/table", range(rows), (6 * size,), dtype).to(device)


def _index(positions: int, rows: int, device: str = "cpu") -> Tensor:
    return inputs.index_tensor("gather-test/index", range(positions), rows, torch.int64).to(device)


def _grads(positions: int, size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[Tensor]:
    return [inputs.row_tensor(f"gather-test/{name}", range(positions), (size,), dtype).to(device) for name in CHUNKS]


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bits_are_those_of_the_model(device: str, dtype: torch.dtype) -> None:
    """Also where the table is a view of a wider one, with a row stride that is no multiple of a vector."""
    for size in (1, 17, 40):
        table, index = _table(6, size, dtype, device), _index(50, 6, device)
        wide = torch.full((6, 6 * size + 5), float("nan"), dtype=dtype, device=device)
        wide[:, 3:-2] = table
        expected = [chunk.index_select(0, index) for chunk in table.chunk(6, -1)]
        for given in (table, wide[:, 3:-2], table.unflatten(1, (6, size))):
            for want, got in zip(expected, adaln_row_gather(given, index), strict=True):
                assert got.is_contiguous() and digest(want) == digest(got)


def test_every_byte_of_a_nan_is_copied() -> None:
    payloads = torch.arange(0x7F81, 0x7F81 + 12, dtype=torch.int16).view(torch.bfloat16)[None]
    rows = adaln_row_gather(payloads, torch.zeros(2, dtype=torch.int64))
    assert torch.stack(rows, 1).view(2, 12).view(torch.int16).tolist() == [payloads[0].view(torch.int16).tolist()] * 2


def test_chunks_and_modalities_have_their_channels() -> None:
    """Probe H4: output channel m 6H + c H + h of the projection is channel h of chunk c of modality m."""
    timesteps, size = 2, 4
    number = torch.arange(timesteps * 18 * size, dtype=torch.float32)
    table = number.view(3 * timesteps, 6 * size)  # a projection (T, 18 H), seen by rows
    indices, tags = torch.tensor([1, 0, 1, 0]), torch.tensor([2, 0, 1, 1])
    found = adaln_row_gather(table, adaln_indices(indices, tags, timesteps))
    assert list(found._fields) == list(CHUNKS)
    for chunk, rows in enumerate(found):
        for position, (t, m) in enumerate(zip(indices.tolist(), tags.tolist(), strict=True)):
            first = t * 18 * size + m * 6 * size + chunk * size
            assert rows[position].tolist() == list(range(first, first + size))


# --- backward ---------------------------------------------------------------------------------------------------------


def _spelled(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    out = torch.zeros(rows, grad.shape[1])
    for row in range(rows):
        mine = grad[index == row].float()
        tiles = [fold.left_fold(mine[at : at + 256], 0) for at in range(0, mine.shape[0], 256)]
        for tile in tiles:
            out[row] += tile
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradient_is_the_spelled_out_order(dtype: torch.dtype) -> None:
    """600 positions in a row of the table are three tiles; row 3 has none."""
    index = torch.cat([torch.full((600,), 2), torch.tensor([0, 1, 4] * 20)])[torch.arange(660) * 7 % 660]
    table, grads = _table(5, 3, dtype), _grads(660, 3, dtype)
    layout = samebits.segments(index, 5)
    found = adaln_row_gather_backward(tuple(grads), table, layout.index, layout.order, layout.bounds)
    assert found.dtype == torch.float32 and found.shape == table.shape
    for chunk, grad in enumerate(grads):
        assert digest(found[:, 3 * chunk : 3 * chunk + 3].contiguous()) == digest(_spelled(grad, index, 5))
    assert not found[3].any() and not found[3].signbit().any()
    leaf = table.clone().requires_grad_()
    torch.autograd.backward(list(adaln_row_gather(leaf, index)), grads)
    assert leaf.grad is not None and digest(leaf.grad) == digest(found.to(dtype))


def test_another_tile_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.zeros(400, dtype=torch.int64)
    table, grads = _table(1, 40, torch.float32), tuple(grad / 3 for grad in _grads(400, 40, torch.float32))
    honest = adaln_row_gather_backward(grads, table, index)
    monkeypatch.setattr(segment_sums, "segment_sums", lambda terms, order, bounds: fold.left_fold(terms, 0)[None])
    assert (adaln_row_gather_backward(grads, table, index) != honest).float().mean() > 0.3


def test_gradients_that_are_none_are_zeros() -> None:
    """A result that nobody used: its chunk of the table gets +0, the others keep their bits."""
    index, grads = _index(90, 4), _grads(90, 8)
    full = adaln_row_gather_backward(tuple(grads), _table(4, 8), index).view(4, 6, 8)
    for kept in ([0], [1, 5], [2, 3, 4], []):
        some = tuple(g if at in kept else None for at, g in enumerate(grads))
        found = adaln_row_gather_backward(some, _table(4, 8), index).view(4, 6, 8)
        for chunk in range(6):
            expected = full[:, chunk] if chunk in kept else torch.zeros(4, 8)
            assert digest(found[:, chunk].contiguous()) == digest(expected.contiguous())
    leaf = _table(4, 8).requires_grad_()
    results = adaln_row_gather(leaf, index)
    torch.autograd.backward([results.gate_msa], [grads[2]])
    assert leaf.grad is not None
    assert digest(leaf.grad[:, 16:24].contiguous()) == digest(full[:, 2].bfloat16().contiguous())
    assert not leaf.grad[:, :16].any() and not leaf.grad[:, 24:].any()


def test_other_rows_do_not_matter() -> None:
    """The gradient of a table row depends on its own positions alone."""
    index, grads = _index(500, 3), _grads(500, 8)
    whole = adaln_row_gather_backward(tuple(grads), _table(3, 8), index)
    alone = index == 1
    own = adaln_row_gather_backward(tuple(g[alone] for g in grads), _table(3, 8), index[alone])
    assert digest(whole[1]) == digest(own[1])


@pytest.mark.parametrize("device", DEVICES)
def test_no_positions(device: str) -> None:
    table = _table(4, 8, device=device).requires_grad_()
    results = adaln_row_gather(table, torch.zeros(0, dtype=torch.int64, device=device))
    assert all(r.shape == (0, 8) for r in results)
    torch.autograd.backward(list(results), [torch.zeros_like(r) for r in results])
    assert table.grad is not None and not table.grad.any()


def test_a_batch_of_positions_and_a_layout_made_before() -> None:
    table, index = _table(4, 8), _index(24, 4)
    flat = adaln_row_gather(table, index)
    for given, shape in ((index.view(2, 3, 4), (2, 3, 4, 8)), (samebits.segments(index, 4), (24, 8))):
        for want, got in zip(flat, adaln_row_gather(table, given), strict=True):
            assert got.shape == shape and digest(want) == digest(got.reshape(24, 8))


def test_a_layout_is_a_snapshot_and_a_tensor_is_read_again() -> None:
    table, index = _table(4, 8), _index(24, 4)
    layout, before = samebits.segments(index, 4), adaln_row_gather(table, index)
    index[5] = (index[5] + 1) % 4
    assert digest(adaln_row_gather(table, layout).gate_mlp) == digest(before.gate_mlp)
    changed = adaln_row_gather(table, index).gate_mlp
    assert digest(changed[5]) == digest(table[index[5], 40:]) and digest(changed[5]) != digest(before.gate_mlp[5])
    index[5] = 4
    with pytest.raises(IndexError, match=r"index is 4 at position 5, outside 0 \.\. 3"):
        adaln_row_gather(table, index)


def test_wrong_arguments_are_refused() -> None:
    index = _index(8, 4)
    for shape in ((4, 47), (4, 0), (4, 5, 8), (48,)):
        with pytest.raises(ValueError, match=r"expected \(R, 6 H\)"):
            adaln_row_gather(torch.zeros(shape).bfloat16(), index)
    with pytest.raises(TypeError, match="table must be a"):
        adaln_row_gather([1.0], index)
    with pytest.raises(TypeError, match=r"expected torch\.int64"):
        adaln_row_gather(_table(4, 8), index.int())
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16 or torch\.float16 or torch\.float32"):
        adaln_row_gather(_table(4, 8).double(), index)
    with pytest.raises(TypeError, match="must agree"):
        grads = _grads(8, 8)
        adaln_row_gather_backward((*grads[:5], grads[5].float()), _table(4, 8), index)
    with pytest.raises(ValueError, match="expected 6 gradients, got 5"):
        adaln_row_gather_backward(tuple(_grads(8, 8)[:5]), _table(4, 8), index)
    with pytest.raises(ValueError, match="for a table of 3 rows, but the table has 4"):
        adaln_row_gather(_table(4, 8), samebits.segments(index % 3, 3))


# --- corrupted metadata -----------------------------------------------------------------------------------------------


def _corrupted() -> dict[str, Callable[[Tensor, Tensor, Tensor], None]]:
    def swap(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        order[[0, -1]] = order[[-1, 0]]

    def twice(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        order[1] = order[0]

    def beyond(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        order[3] = 2**40

    def below(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        order[3] = -1

    def shifted(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        bounds[1, 0] += 1

    def far(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        bounds[2, 0] = 2**40

    def tiles(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        bounds[2, 1] += 1

    def first(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        bounds[:, 1] += 1

    def index_beyond(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        index[7] = 3

    def index_below(index: Tensor, order: Tensor, bounds: Tensor) -> None:
        index[7] = -1

    found = (swap, twice, beyond, below, shifted, far, tiles, first, index_beyond, index_below)
    return {function.__name__: function for function in found}


def backward_of_corrupted(kind: str, device: str) -> None:
    """The backward of a layout that is wrong in one place."""
    index = _index(700, 3)
    order, bounds = sorted_positions(index, 3)
    _corrupted()[kind](index, order, bounds)
    moved = (t.to(device) for t in (index, order, bounds))
    adaln_row_gather_backward(tuple(_grads(700, 8, device=device)), _table(3, 8, device=device), *moved)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("kind", list(_corrupted()))
def test_corrupted_metadata_is_refused(kind: str) -> None:
    with pytest.raises(IndexError):
        backward_of_corrupted(kind, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(_corrupted()))
def test_corrupted_metadata_is_refused_on_a_gpu(kind: str) -> None:
    """In a process of its own: a device-side assertion ends the context."""
    folder, module = Path(__file__).parent, Path(__file__).stem
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from {module} import *; backward_of_corrupted({kind!r}, 'cuda')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0 and "samebits: " in ended.stderr + ended.stdout, ended.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("value", [-1, 3, 2**62])
def test_an_index_in_a_graph_is_checked_by_the_kernel(value: int) -> None:
    program = (
        "import torch; from samebits import registry; op = registry.operator('adaln_row_gather'); "
        "table = torch.zeros(3, 6, 8, device='cuda').bfloat16(); index = torch.zeros(9, dtype=torch.int64, device='cuda'); "
        f"op.forward(table, index, None, None); torch.cuda.synchronize(); index[4] = {value}; "
        "op.forward(table, index, None, None); torch.cuda.synchronize()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0 and "0 <= index" in ended.stderr + ended.stdout, ended.stderr


# --- adaln_indices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_three_for_each_timestep(device: str, dtype: torch.dtype) -> None:
    timestep = torch.arange(4, device=device, dtype=dtype).repeat_interleave(3)
    tag = torch.arange(3, device=device, dtype=dtype).repeat(4)
    found = adaln_indices(timestep, tag, 4)
    assert found.dtype == torch.int64 and found.tolist() == list(range(12))
    assert adaln_indices(timestep[:0], tag[:0], 1).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("timestep", "tag", "name"),
    [
        (0, 3, "token_tags is 3"),  # probe H2: a fourth modality would be the next timestep's first
        (0, -1, "token_tags is -1"),
        (1, -3, "token_tags is -3"),
        (-1, 0, "timestep_indices is -1"),
        (2, 0, "timestep_indices is 2"),  # probe H3
    ],
)
def test_values_outside_are_refused_by_name(dtype: torch.dtype, timestep: int, tag: int, name: str) -> None:
    timesteps, tags = torch.tensor([0, 1, timestep], dtype=dtype), torch.tensor([2, 1, tag], dtype=dtype)
    with pytest.raises(IndexError, match=f"adaln_indices: {name} at position 2"):
        adaln_indices(timesteps, tags, 2)


@pytest.mark.parametrize("timestep", [(2**64 + 2) // 3 - 2**63, (2**64 + 2) // 3, 2**63 - 1, -(2**63)])
def test_values_that_would_wrap_into_the_table_are_refused(timestep: int) -> None:
    """(2^64 + 2) / 3 times 3 is 2 in 64 bits."""
    wrapped = (timestep + 2**63) % 2**64 - 2**63
    with pytest.raises(IndexError, match="timestep_indices"):
        adaln_indices(torch.tensor([wrapped]), torch.tensor([0]), 4)


def test_another_tag_or_timestep_is_another_row() -> None:
    """Probes H2 and H3: a flip inside the range is no error, and shows."""
    table = _table(12, 8)
    for moved in ((1, 1), (2, 0)):
        one = adaln_row_gather(table, adaln_indices(torch.tensor([1]), torch.tensor([0]), 4))
        other = adaln_row_gather(table, adaln_indices(torch.tensor([moved[0]]), torch.tensor([moved[1]]), 4))
        assert all(digest(a) != digest(b) for a, b in zip(one, other, strict=True))


def test_compiled_a_wrong_value_is_no_row() -> None:
    """Where no value may be looked at, a wrong one must not become a row of the table."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda t, m: adaln_indices(t, m, 2), fullgraph=True, backend="aot_eager")
    timesteps, tags = torch.tensor([0, 1, -1, 2, 1, 1]), torch.tensor([2, 0, 2, 0, 3, -2])
    assert compiled(timesteps, tags).tolist() == [2, 3, -1, -1, -1, -1]


def test_wrong_indices_are_refused() -> None:
    good = torch.zeros(3, dtype=torch.int64)
    for bad in (good.float(), good.bool(), good.short()):
        with pytest.raises(TypeError, match=r"expected torch\.int64 or torch\.int32"):
            adaln_indices(bad, good, 1)
    with pytest.raises(TypeError, match="must agree"):
        adaln_indices(good, good.int(), 1)
    with pytest.raises(TypeError, match="token_tags must be a"):
        adaln_indices(good, [0, 0, 0], 1)
    for bad in (good[:2], good[None]):
        with pytest.raises(ValueError, match="shape"):
            adaln_indices(good, bad, 1)
    with pytest.raises(ValueError, match="meta"):
        adaln_indices(good, good.to("meta"), 1)
    for count, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_timesteps"):
            adaln_indices(good, good, count)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_every_plan_covers_every_result() -> None:
    for call in calls(registry.spec("adaln_row_gather"), H200, rows=(1, 9, 700, 131072)):
        size, rows = call.size("H"), call.rows
        tiles = most_tiles(rows, call.size("R"))
        for plan in plans(call):
            first = plan[0]
            assert isinstance(first.grid, int) and 0 < first.grid < 2**31
            told: list[int] = list(first.arguments)
            if not call.backward:
                width, blocks = told
                unit = dict(first.kernel.defines)["UNIT"]
                assert first.grid == 6 * blocks and blocks * 8 >= rows
                assert width * unit == size * {"float32": 4}.get(call.layout("table").dtype, 2)
                assert call.layout("table").aligned or unit != 16
                continue
            lanes, slabs = told
            columns = dict(first.kernel.defines)["COLUMNS"]
            assert lanes % 32 == 0 and first.block % lanes == 0 and first.block <= 128
            assert lanes * slabs * columns >= size
            assert first.grid * (first.block // lanes) >= slabs * 6 * tiles
            assert isinstance(plan[1].grid, tuple) and plan[1].grid[0] == call.size("R")


def test_the_scratch_is_a_row_per_tile() -> None:
    """No six gradients stacked: at most 1 / 256 of them and a tile for each table row."""
    assert most_tiles(131072, 9) <= 131072 // 256 + 9


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [264, 4097, 32768])
def test_the_bits_at_the_size_of_the_model(positions: int) -> None:
    op = registry.operator("adaln_row_gather")
    table, index = _table(9, 5376, device="cuda").unflatten(1, (6, -1)), _index(positions, 9, "cuda")
    draw = torch.Generator("cuda").manual_seed(1)
    grads = [torch.randn(positions, 5376, generator=draw, device="cuda").bfloat16() for _ in range(6)]
    for backward, tensors in ((False, (table, index, None, None)), (True, (*grads, table, index, None, None))):
        call = op.backward if backward else op.forward
        for expected, got in zip(call(*tensors, backend="reference"), call(*tensors, backend="cuda"), strict=True):
            assert expected is not None and got is not None
            assert digest(expected) == digest(got)
