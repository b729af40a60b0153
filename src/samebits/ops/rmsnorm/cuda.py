"""CUDA backend of ``rmsnorm`` and of ``rmsnorm_modulated``: which kernels run a call. Every plan of a call has the same bits.

Floors per row at H columns of a 16-bit type, over 4.2 TB/s: forward 4 H bytes; backward 6 H (read grad_y and x, write grad_x).
Many rows take one kernel that reads them once; few rows, which are too few tiles of 256 to fill a GPU, and rows that are too wide
for its registers take two, one for grad_x and one for the sums. The fold of the tiles is a last, short launch.
"""

from __future__ import annotations

import ctypes
from itertools import chain

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.rmsnorm.spec import SPEC
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds
from samebits.segmentation import TILE, most_tiles, sorted_positions

FOLD_THREADS = 128
_BY_COLUMNS = ("grad_y", "grad_out", "x", "y", "residual", "weight", "shift", "scale", "gate")
"""Inputs that are read several columns at a time."""
_NARROW = 128
"""Columns that sixteen threads hold, eight each."""
_FORWARD_HOLDS, _GRAD_X_HOLD = (4, 11), 6
"""Vectors of a row that one of 64 threads, or of 128, keeps in registers."""
_TILE_COLUMNS, _TILE_STAGES = 21 * 32 * 8, 6
"""As ``MOST_WARPS`` and ``STAGES`` of backward_tile.cu."""
_TILE_STATIC = 5 * 1024
"""Its static arrays, and what the driver keeps per block."""
_ENOUGH_WARPS = 16
"""Warps of a multiprocessor that keep it busy."""


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    if not call.backward:
        return tuple((step,) for step in _forward(call))
    sums = any(name != "grad_x" for name in call.wanted)
    fold = fold_launch(call, _tiles(call), tables=2 if _modulated(call) else 0, shared=True)
    parts = [_grad_x(call)] if "grad_x" in call.wanted else []
    parts += [[(step, fold) for step in _sums(call)]] if sums else []
    most = max((len(options) for options in parts), default=1)
    apart = [tuple(chain.from_iterable(options[i % len(options)] for options in parts)) for i in range(most)]
    if not sums or "grad_x" not in call.wanted or not _fits_a_tile(call):
        return tuple(apart)
    tile = _tile(call)
    busy = _tiles(call) * (tile.block // 32) >= _ENOUGH_WARPS * call.device.multiprocessors
    return ((tile, fold), *apart) if busy else (apart[0], (tile, fold), *apart[1:])


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    x, weight, rows, size = inputs["x"], inputs["weight"], call.rows, call.size("H")
    tables: tuple[Tensor | int, ...] = table_arguments(inputs, "scale") if _modulated(call) else (0,) * 5
    if not call.backward:
        shift = (inputs["shift"], inputs["shift"].stride(0)) if _modulated(call) else (0, 0)
        ends = (results["y"], results["rstd"], rows, size, ctypes.c_float(scalars["eps"]))
        launch(plan[0], x, x.stride(0), weight, *shift, *tables, *ends)
        return
    grad, rstd = inputs["grad_y"], inputs["rstd"]
    given = (grad, grad.stride(0), x, x.stride(0), weight)
    sums: tuple[str, ...] = ("grad_weight", "grad_shift", "grad_scale")
    segments: tuple[Tensor | int, ...] = (0,) * 5
    partials: dict[str, Tensor] = {}
    if any(name in results for name in sums):
        if _modulated(call):
            segments = segment_arguments(inputs, call.size("R"))
        partials = {name: rstd.new_empty(_tiles(call), size) for name in sums if name in results}
    kept = tuple(partials.get(name, 0) for name in sums)
    own = int(call.grad_dtype != "float32")
    saved = (rstd, rstd.stride(0))
    for step in plan:
        entry = step.kernel.entry
        if entry == "backward_x":
            launch(step, *given, *tables, *saved, results["grad_x"], own, rows, size)
        elif entry == "backward_tile":
            launch(step, *given, *tables[:4], *segments, *saved, results["grad_x"], own, *kept, rows, size)
        elif entry == "backward_sums":
            launch(step, *given, *tables[:4], *segments, *saved, *kept, _tiles(call), rows, size, *step.arguments)
        else:
            first = (partials.get("grad_shift", 0), results.get("grad_shift", 0))
            second = (partials.get("grad_scale", 0), results.get("grad_scale", 0))
            shared = (partials.get("grad_weight", 0), results.get("grad_weight", 0), own)
            launch(step, *first, *second, *shared, *segments[2:], _tiles(call), rows, size, *step.arguments)


# --- what operators with tables share ---------------------------------------------------------------------------------


def table_arguments(inputs: dict[str, Tensor], name: str) -> tuple[Tensor | int, ...]:
    """A table and its row stride, the index and its stride, the number of rows."""
    table, index = inputs[name], inputs["index"]
    return (table, table.stride(0), index, index.stride(0), table.shape[0])


def segment_arguments(inputs: dict[str, Tensor], rows: int) -> tuple[Tensor | int, ...]:
    """order and bounds with their strides, and the number of table rows; made here where the caller gave none."""
    order, bounds = inputs.get("order"), inputs.get("bounds")
    if order is None or bounds is None:
        made = sorted_positions(inputs["index"], rows)
        order, bounds = made[0] if order is None else order, made[1] if bounds is None else bounds
    return (order, order.stride(0), bounds, bounds.stride(0), rows)


def fold_launch(call: Call, tiles: int, tables: int, shared: bool) -> Launch:
    """The fold of tiles for this many table gradients and, with ``shared``, for a parameter that all rows share."""
    choices = {"ELEMENT": _element(call), "SEGMENTED": int(tables > 0)}
    rows = tables * call.size("R") + int(shared) if tables else 1
    columns = min(-(-call.size("H") // FOLD_THREADS), 65535)  # a block takes more where these are not enough
    return Launch(kernel("fold_tiles", choices), (rows, columns), FOLD_THREADS, arguments=(tables,))


def vector_access(call: Call) -> int:
    """8 where 16-byte accesses are legal for every row and every result, else 1."""
    whole = call.size("H") % 8 == 0
    return 8 if whole and all(layout.aligned for name, layout in call.layouts if name in _BY_COLUMNS) else 1


def column_steps(call: Call, tiles: int) -> list[tuple[int, int, int, int, int]]:
    """How a kernel that walks the positions of tiles cuts its columns: (columns of a thread, threads of a tile, slabs of
    columns, threads of a block, blocks), best first. Narrow steps where there are few tiles, so that many threads read."""
    found = []
    for columns in (8, 2):
        warps = -(-call.size("H") // (32 * columns))
        slabs = -(-warps // 4)
        lanes = -(-warps // slabs) * 32
        slots = max(1, min(4, 128 // lanes))
        blocks = min(slabs * -(-tiles // slots), 2**31 - 1)  # a block takes more where these are not enough
        found.append((columns, lanes, slabs, lanes * slots, blocks))
    enough = tiles * -(-call.size("H") // 256) >= 8 * call.device.multiprocessors
    return found if enough else found[::-1]


def kernel(entry: str, choices: dict[str, int], op: str = "rmsnorm") -> CudaKernel:
    return CudaKernel(op, entry, tuple(sorted(choices.items())))


# --- the kernels of a call --------------------------------------------------------------------------------------------


def _modulated(call: Call) -> bool:
    return call.op == "rmsnorm_modulated"


def _element(call: Call) -> int:
    return ELEMENTS[call.layouts[0][1].dtype]


def _tiles(call: Call) -> int:
    return most_tiles(call.rows, call.size("R")) if _modulated(call) else -(-call.rows // TILE)


def _choices(call: Call, **more: int) -> dict[str, int]:
    return {"ELEMENT": _element(call), "MODULATED": int(_modulated(call)), **more}


def _forward(call: Call) -> list[Launch]:
    vec, size = vector_access(call), call.size("H")
    hold = next((h for h in _FORWARD_HOLDS if h * 64 * 8 >= size), 0)
    options = [(64, 0)]
    if vec == 8 and size <= _NARROW:
        options = [(16, 1), (64, 0)]
    elif vec == 8 and hold:
        options = [(64, hold), (64, 0)]
    launches = []
    for lanes, held in options:
        block_rows = 1 if lanes == 64 else 128 // lanes
        code = kernel("forward", _choices(call, VEC=vec, LANES=lanes, HOLD=held))
        launches.append(Launch(code, -(-call.rows // block_rows), block_rows * lanes))
    return launches


def _grad_x(call: Call) -> list[tuple[Launch, ...]]:
    vec, size = vector_access(call), call.size("H")
    options = [(128, 0)]
    if vec == 8 and size <= _NARROW:
        options = [(16, 1), (128, 0)]
    elif vec == 8 and size <= _GRAD_X_HOLD * 128 * 8:
        options = [(128, _GRAD_X_HOLD), (128, 0)]
    launches: list[tuple[Launch, ...]] = []
    for lanes, held in options:
        code = kernel("backward_x", _choices(call, VEC=vec, LANES=lanes, HOLD=held))
        launches.append((Launch(code, -(-call.rows // (128 // lanes)), 128),))
    return launches


def _sums(call: Call) -> list[Launch]:
    vec = vector_access(call)
    return [
        Launch(
            kernel("backward_sums", _choices(call, VEC=vec, COLUMNS=columns)), blocks, block, arguments=(lanes, slabs)
        )
        for columns, lanes, slabs, block, blocks in column_steps(call, _tiles(call))
    ]


def _fits_a_tile(call: Call) -> bool:
    short = call.size("H") <= _TILE_COLUMNS and _tile_bytes(call) + _TILE_STATIC <= call.device.shared_bytes
    return short and vector_access(call) == 8 and _element(call) != 0


def _tile(call: Call) -> Launch:
    code = kernel("backward_tile", _choices(call))
    return Launch(code, _tiles(call), _tile_threads(call), _tile_bytes(call))


def _tile_threads(call: Call) -> int:
    return -(-call.size("H") // 256) * 32


def _tile_bytes(call: Call) -> int:
    return _TILE_STAGES * 2 * _tile_threads(call) * 16


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
