"""CUDA backend of ``swiglu``: which kernel runs a call. Every plan of a call has the same bits.

Floors per row at F columns of a 16-bit type, over 4.2 TB/s: forward 6 F bytes (read both halves, write y); backward 10 F (read
grad_y and both halves, write both gradients).
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.swiglu.spec import SPEC
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_THREADS = 256
_HOLDS = (2, 1)
"""Vectors of eight columns of each input that a thread has on their way."""
_FULL = 2048
"""Threads of a multiprocessor."""
_MOST_ROWS = 2**31 - 1


def refuses(call: Call) -> str | None:
    """Why these kernels do not take the call, or None."""
    return None if call.rows <= _MOST_ROWS else f"{call.rows} rows are more than a launch has blocks for"


def plans(call: Call) -> tuple[tuple[Launch], ...]:
    if refuses(call):
        return ()
    vectors = call.rows * -(-call.size("F") // 8)
    many = vectors >= 2 * _FULL * call.device.multiprocessors
    return tuple((_launch(call, hold),) for hold in (_HOLDS if many else _HOLDS[::-1]))


def run(
    call: Call,
    plan: tuple[Launch],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    (step,), x = plan, inputs["x"]
    given = (x, x.stride(0), x.stride(1))
    sizes = (call.rows, call.size("F"), *step.arguments)
    if call.backward:
        grad = inputs["grad_y"]
        launch(step, grad, grad.stride(0), *given, results["grad_x"], *sizes)
    else:
        launch(step, *given, results["y"], *sizes)


def _launch(call: Call, hold: int) -> Launch:
    """A row in equal slabs of whole warps, at most a block wide; several rows in a block where they are short."""
    turns = -(-call.size("F") // (8 * hold))
    slabs = -(-turns // _THREADS)
    lanes = -(-turns // (slabs * 32)) * 32
    rows = _THREADS // lanes
    element = ELEMENTS[call.layout("x").dtype]
    defines = (("ELEMENT", element), ("HOLD", hold), ("VEC", _vector_access(call)))
    entry = "backward" if call.backward else "forward"
    grid = (-(-call.rows // rows), -(-turns // lanes))
    return Launch(CudaKernel("swiglu", entry, defines), grid, rows * lanes, arguments=(lanes,))


def _vector_access(call: Call) -> int:
    """8 where 16-byte accesses are legal for every row of every input and result, else 1."""
    return 8 if call.size("F") % 8 == 0 and call.aligned else 1


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
