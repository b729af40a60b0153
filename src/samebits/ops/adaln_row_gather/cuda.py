"""CUDA backend of ``adaln_row_gather``: which kernels run a call. Every plan of a call has the same bits.

Floors per position at H columns of a 16-bit type: forward writes 12 H bytes, as the table stays in the caches (2.0 ms for 131072
positions of 5376 columns at 4.2 TB/s); backward reads 12 H.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.adaln_row_gather.spec import CHUNKS, SPEC
from samebits.ops.rmsnorm.cuda import FOLD_THREADS, column_steps, kernel, segment_arguments
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.sweep import cuda_builds
from samebits.segmentation import most_tiles

_OP = "adaln_row_gather"
_WARPS = 8
"""As in forward.cu: positions of a block."""
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_COUNT = len(CHUNKS)


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    size, dtype = call.size("H"), call.layout("table").dtype
    if not call.backward:
        whole = call.layout("table").aligned and size * _ITEMSIZE[dtype] % 16 == 0
        unit = 16 if whole else _ITEMSIZE[dtype]
        blocks = -(-call.rows // _WARPS)
        arguments = (size * _ITEMSIZE[dtype] // unit, blocks)
        return ((Launch(kernel("forward", {"UNIT": unit}, _OP), _COUNT * blocks, 32 * _WARPS, arguments=arguments),),)
    tiles, element = most_tiles(call.rows, call.size("R")), ELEMENTS[dtype]
    columns = min(-(-_COUNT * size // FOLD_THREADS), 65535)  # a block takes more where these are not enough
    code = kernel("fold_tiles", {"ELEMENT": element, "SEGMENTED": 1})
    fold = Launch(code, (call.size("R"), columns), FOLD_THREADS, arguments=(1,))
    choices = {"ELEMENT": element, "VEC": _vec(call)}
    return tuple(
        (Launch(kernel("backward", choices | {"COLUMNS": columns}, _OP), blocks, block, arguments=(lanes, slabs)), fold)
        for columns, lanes, slabs, block, blocks in column_steps(call, _COUNT * tiles)
    )


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    index, rows, size, table_rows = inputs["index"], call.rows, call.size("H"), call.size("R")
    if not call.backward:
        (step,) = plan
        table = inputs["table"]
        width, blocks = step.arguments
        per_unit = size // width  # elements
        strides = (table.stride(0) // per_unit, table.stride(1) // per_unit)
        out = [results.get(name, 0) for name in CHUNKS]
        launch(step, table, *strides, index, index.stride(0), table_rows, *out, rows, width, blocks)
        return
    step, fold = plan
    tiles = most_tiles(rows, table_rows)
    sums = results["grad_table"].new_empty(tiles, _COUNT, size)
    segments = segment_arguments(inputs, table_rows)
    grads = [inputs.get(f"grad_{name}") for name in CHUNKS]
    upstream = [part for grad in grads for part in ((0, 0) if grad is None else (grad, grad.stride(0)))]
    launch(step, *upstream, index, index.stride(0), *segments, sums, tiles, rows, size, *step.arguments)
    unused = (0, 0, 0, 0, 0)
    launch(
        fold, sums, results["grad_table"], *unused, *segments[2:], tiles, rows, _COUNT * size, *fold.arguments
    )  # fmt: skip


def _vec(call: Call) -> int:
    """8 where 16-byte accesses are legal for every gradient and for the sums, else 1."""
    names = [f"grad_{name}" for name in CHUNKS]
    return 8 if call.size("H") % 8 == 0 and all(call.layout(n).aligned for n in names if call.has(n)) else 1


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
