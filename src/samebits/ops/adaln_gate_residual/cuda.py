"""CUDA backend of ``adaln_gate_residual``: which kernels run a call. Every plan of a call has the same bits.

Floors per row at H columns of a 16-bit type, over 4.2 TB/s: forward 6 H bytes (read residual and y, write out); backward 6 H (read
grad_out and y, write grad_y). No row is reduced, so a block takes a tile of 256 positions and a slab of columns.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.adaln_gate_residual.spec import SPEC
from samebits.ops.rmsnorm.cuda import (
    column_steps,
    fold_launch,
    kernel,
    segment_arguments,
    table_arguments,
    vector_access,
)
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.sweep import cuda_builds
from samebits.segmentation import most_tiles

_OP = "adaln_gate_residual"
_HOLD, _THREADS = 3, 256
"""As in forward.cu: vectors that a thread has on their way, and the most threads of a block."""


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    if "grad_gate" not in call.wanted:
        return tuple((step,) for step in _rows(call))
    tiles = _tiles(call)
    fold = fold_launch(call, tiles, tables=1, shared=False)
    choices = {"ELEMENT": _element(call), "VEC": vector_access(call)}
    return tuple(
        (Launch(kernel("backward", choices | {"COLUMNS": columns}, _OP), blocks, block, arguments=(lanes, slabs)), fold)
        for columns, lanes, slabs, block, blocks in column_steps(call, tiles)
    )


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    y, rows, size, tiles = inputs["y"], call.rows, call.size("H"), _tiles(call)
    table = table_arguments(inputs, "gate")
    if not call.backward:
        (step,) = plan
        added = (inputs["residual"], inputs["residual"].stride(0), y, y.stride(0))
        launch(step, *added, *table, results["out"], 1, rows, size, *step.arguments)
        return
    grad, own = inputs["grad_out"], int(call.grad_dtype != "float32")
    if "grad_gate" not in results:
        (step,) = plan
        launch(step, 0, 0, grad, grad.stride(0), *table, results["grad_y"], own, rows, size, *step.arguments)
        return
    step, fold = plan
    partials = results["grad_gate"].new_empty(tiles, size)
    segments = segment_arguments(inputs, call.size("R"))
    given = (grad, grad.stride(0), y, y.stride(0), *table[:4], *segments)
    launch(step, *given, results.get("grad_y", 0), own, partials, tiles, rows, size, *step.arguments)
    unused = (0, 0, 0, 0, 0)
    launch(fold, partials, results["grad_gate"], *unused, *segments[2:], tiles, rows, size, *fold.arguments)


def _rows(call: Call) -> list[Launch]:
    """The kernel that goes row by row: as many threads as read a row at once, several rows where they are short."""
    vectors = -(-call.size("H") // 8)
    lanes = min(_THREADS, -(-vectors // (32 * _HOLD)) * 32)
    choices = {"ELEMENT": _element(call), "VEC": vector_access(call), "ADD": int(not call.backward)}
    code = kernel("forward", choices, _OP)
    launches = []
    for threads in dict.fromkeys((lanes, 32)):
        slots = _THREADS // threads
        launches.append(Launch(code, -(-call.rows // slots), slots * threads, arguments=(threads,)))
    return launches


def _element(call: Call) -> int:
    return ELEMENTS[call.layouts[0][1].dtype]


def _tiles(call: Call) -> int:
    return most_tiles(call.rows, call.size("R"))


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
