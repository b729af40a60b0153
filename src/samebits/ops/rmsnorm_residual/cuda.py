"""CUDA backend of ``rmsnorm_residual``: which kernels run a call, and their launches. Every plan of a call has the same bits.

Floors per row at D columns, over 4.2 TB/s: forward 6 D bytes; grad_x 8 D (with the gradient of the copy, BF16 out),
grad_gamma 4 D. An ascending chain adds D * 4 cycles of latency (8.3 us at D = 4096) that only more rows in flight hide;
grad_gamma's chain is T * 4 cycles.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.rmsnorm_residual.spec import SPEC
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_STATIC_SHARED = 1024
"""Room for the kernels' static arrays and what the driver keeps per block."""
_FORWARD, _BACKWARD = (256, 3), (128, 6)
"""Threads of an ascending block, and how many blocks share a multiprocessor: while some fold, others load and store."""
_COLUMNS = 128
"""A row in shared memory is padded to this: four parts that are each a multiple of the 32 terms a fold reads ahead."""
_TERMS_BYTES = 2 * (256 + 4) * 4
"""Shared memory for the terms of one row in the ascending backward: two tiles of 256 columns."""


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    steps = []
    if not call.backward:
        steps.append(_forward(call))
    else:
        if "grad_x" in call.wanted:
            steps.append(_backward_x(call))
        if "grad_gamma" in call.wanted:
            steps.append(_backward_gamma(call))
    most = max((len(options) for options in steps), default=1)
    return tuple(tuple(options[i % len(options)] for options in steps) for i in range(most))


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    x, gamma = inputs["x"], inputs["gamma"]
    size, rows = call.size("D"), call.rows
    if not call.backward:
        (step,) = plan
        common = (x, x.stride(0), gamma, results["y"], results.get("residual", 0), results["rstd"], rows, size)
        launch(step, *common, *step.arguments, ctypes.c_float(scalars["eps"]))
        return
    dy, rstd = inputs["grad_y"], inputs["rstd"]
    skip = inputs.get("grad_residual")
    for step in plan:
        if step.kernel.entry == "backward_gamma":
            saved = (x, x.stride(0), rstd, rstd.stride(0))
            launch(step, dy, dy.stride(0), *saved, results["grad_gamma"], inputs.get("start_gamma", 0), rows, size)
        else:
            skip_row = 0 if skip is None else skip.stride(0)
            upstream = (dy, dy.stride(0), 0 if skip is None else skip, skip_row)
            normed = (x, x.stride(0), gamma, rstd, rstd.stride(0))
            launch(step, *upstream, *normed, results["grad_x"], rows, size, *step.arguments)


def _vec(call: Call, *names: str) -> int:
    """16-byte accesses are legal: these inputs allow them, and so does a row of the results."""
    return 8 if call.size("D") % 8 == 0 and all(call.layout(n).aligned for n in names if call.has(n)) else 1


def _forward(call: Call) -> list[Launch]:
    vec = {"VEC": _vec(call, "x", "gamma")}
    if call.contract == "tree512":
        return _tree(call, "forward_tree512", vec)
    if "residual" not in call.wanted:  # a composite that keeps x elsewhere
        vec["WITHOUT_COPY"] = 1
    return _ascending(call, "forward_ascending", vec, _FORWARD, bytes_per_column=2, bytes_per_row=16)


def _backward_x(call: Call) -> list[Launch]:
    choices = {
        "VEC": _vec(call, "grad_y", "grad_residual", "x", "gamma"),
        "OUT_BF16": int(call.grad_dtype == "bfloat16"),
        "HAS_RESIDUAL": int(call.has("grad_residual")),
    }
    if call.contract == "tree512":
        return _tree(call, "backward_x_tree512", choices)
    per_row = 32 + _TERMS_BYTES
    return _ascending(call, "backward_x_ascending", choices, _BACKWARD, bytes_per_column=4, bytes_per_row=per_row)


def _ascending(
    call: Call, entry: str, choices: dict[str, int], block: tuple[int, int], bytes_per_column: int, bytes_per_row: int
) -> list[Launch]:
    """Rows per block: as many as keep every multiprocessor busy, at most what lets its blocks share one."""
    threads, blocks = block
    limit = call.device.shared_bytes - _STATIC_SHARED
    columns = -(-call.size("D") // _COLUMNS) * _COLUMNS
    per_row = columns * bytes_per_column + bytes_per_row
    if per_row > limit:  # one row in several chunks
        columns = (limit - bytes_per_row) // bytes_per_column // _COLUMNS * _COLUMNS
        per_row = columns * bytes_per_column + bytes_per_row
    most = max(1, min(32, (limit // blocks - _STATIC_SHARED) // per_row))
    wanted = -(-call.rows // (call.device.multiprocessors * blocks))
    best = min(most, max(1, wanted))
    kernel = _kernel(entry, choices)
    launches = []
    for block_rows in dict.fromkeys((best, most, 1, min(2, most))):
        grid = -(-call.rows // block_rows)
        launches.append(Launch(kernel, grid, threads, per_row * block_rows, (block_rows, columns)))
    return launches


_HOLDS = {32: (1,), 128: (1, 4, 7), 512: (1, 2)}
"""Threads per row, and how many vectors of it a thread may keep in registers without spilling on any architecture."""


def _tree(call: Call, entry: str, choices: dict[str, int]) -> list[Launch]:
    """Threads per row: many when rows are few, so that a row is read in one round; else just enough to hold a row.

    A row that none of them can hold is read twice by 128 threads.
    """
    vectors = -(-call.size("D") // 8)
    few = call.rows <= 2 * call.device.multiprocessors
    launches = []
    for lanes in [32, 128] if vectors <= 64 else [512, 128] if few else [128, 512]:
        hold = next((h for h in _HOLDS[lanes] if h * lanes >= vectors), 0)
        if hold == 0 and lanes != 128:
            continue
        rows_per_block = max(1, 128 // lanes)
        kernel = _kernel(entry, choices | {"LANES": lanes, "HOLD": hold})
        launches.append(Launch(kernel, -(-call.rows // rows_per_block), max(128, lanes)))
    return launches


def _backward_gamma(call: Call) -> list[Launch]:
    """A block owns 32 columns. Larger tiles and more stages keep more bytes in flight; smaller ones let two blocks share."""
    vec = _vec(call, "grad_y", "x")
    grid = -(-call.size("D") // 32)
    small, large = (128, 3), (256, 4)
    fits = _gamma_bytes(*large) + _STATIC_SHARED <= call.device.shared_bytes
    order = (
        (large, small) if fits and grid <= call.device.multiprocessors else (small, large) if fits else (small, (64, 3))
    )
    return [
        Launch(_kernel("backward_gamma", {"VEC": vec, "TILE": t, "STAGES": s}), grid, 32 + 2 * t, _gamma_bytes(t, s))
        for t, s in order
    ]


def _gamma_bytes(tile: int, stages: int) -> int:
    return 2 * 32 * (tile + 4) * 4 + stages * 2 * 2 * (2 * tile) * 16


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel("rmsnorm_residual", entry, tuple(sorted(choices.items())))


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
