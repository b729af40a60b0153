"""CUDA backend of ``qk_norm_rope``, ``qk_rmsnorm`` and ``rope_3axis``: one set of kernels, built with what an operator does.

Floors per position with N heads of D channels of a 16-bit type, over 4.2 TB/s: forward 4 N D bytes (read x, write y), the backward
of the rotation alone the same, that of a norm 6 N D (read grad_y and x, write grad_x). Every plan of a call has the same bits.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.qk_norm_rope.spec import SPEC
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds
from samebits.segmentation import TILE

_OP = "qk_norm_rope"
_NARROW = 128
"""Columns that sixteen threads hold, eight each; up to 256 it takes thirty-two."""
_FORWARD_THREADS, _BACKWARD_THREADS = 128, 256
"""As ``THREADS`` of forward.cu and backward.cu."""


_MOST_BLOCKS, _LEAST_SHARE = 2**31 - 1, 64


def refuses(call: Call) -> str | None:
    """Why these kernels do not take the call, or None."""
    if call.rows > _MOST_BLOCKS or call.rows * call.size("N") > _MOST_BLOCKS * _LEAST_SHARE:
        return f"{call.rows} positions of {call.size('N')} heads are more blocks than a launch can have"
    return None


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    if refuses(call):
        return ()
    if not call.backward or not _norms(call):
        return tuple((step,) for step in _forward(call))
    if "grad_weight" not in call.wanted:
        rows = call.rows * call.size("N")
        return tuple((_backward(call, tile),) for tile in _shares(call, rows))
    columns = _lanes(call) * 8
    fold = Launch(_kernel("fold_weight", {"ELEMENT": _element(call)}), columns // 8, 256)
    return ((_backward(call, TILE), fold),)


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    angles: tuple[Tensor | int, ...] = (0, 0, 0, 0)
    if _ropes(call):
        angles = (inputs["cos"], inputs["cos"].stride(0), inputs["sin"], inputs["sin"].stride(0))
    sizes = (call.rows, call.size("N"), call.size("D"), call.size("R") if _ropes(call) else 0)
    step = plan[0]
    if step.kernel.entry == "forward":
        x = inputs["grad_y" if call.backward else "x"]
        y = results["grad_x" if call.backward else "y"]
        eps = ctypes.c_float(scalars.get("eps", 0.0))
        ends = (y, results.get("rstd", 0), *sizes, *step.arguments, eps)
        launch(step, x, x.stride(0), x.stride(1), inputs.get("weight", 0), *angles, *ends)
        return
    grad, x, rstd = inputs["grad_y"], inputs["x"], inputs["rstd"]
    own = int(call.grad_dtype != "float32")
    given = (grad, grad.stride(0), grad.stride(1), x, x.stride(0), x.stride(1), inputs["weight"], *angles)
    tiles, columns = -(-call.rows * call.size("N") // TILE), _lanes(call) * 8
    partials = rstd.new_empty(tiles, columns) if "grad_weight" in results else 0
    saved = (rstd, rstd.stride(0), results.get("grad_x", 0), own, partials)
    steps = _steps(call, (grad.stride(0), grad.stride(1)), (x.stride(0), x.stride(1)), (rstd.stride(0), 1))
    launch(step, *given, *saved, *sizes, *step.arguments, *steps)
    for fold in plan[1:]:
        launch(fold, partials, results["grad_weight"], own, tiles, columns, call.size("D"))


# --- what a call needs ------------------------------------------------------------------------------------------------


def _norms(call: Call) -> bool:
    return call.op != "rope_3axis"


def _ropes(call: Call) -> bool:
    return call.op != "qk_rmsnorm"


def _element(call: Call) -> int:
    return ELEMENTS[call.layouts[0][1].dtype]


def _lanes(call: Call) -> int:
    return 16 if call.size("D") <= _NARROW else 32


def _vector_access(call: Call) -> int:
    """8 where 16-byte accesses are legal for every row and every result, and the columns of a vector are rotated alike, else 1."""
    whole = call.size("D") % 8 == 0 and (not _ropes(call) or call.size("R") % 16 == 0)
    return 8 if whole and all(layout.aligned for name, layout in call.layouts if name != "rstd") else 1


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel(_OP, entry, tuple(sorted(choices.items())))


def _choices(call: Call) -> dict[str, int]:
    return {
        "ELEMENT": _element(call),
        "VEC": _vector_access(call),
        "LANES": _lanes(call),
        "NORM": int(_norms(call)),
        "ROPE": int(_ropes(call)),
    }


def _forward(call: Call) -> list[Launch]:
    """As many groups of threads as a position has heads for, at most all of a block; or one, which reads the angles once."""
    groups, ahead = _FORWARD_THREADS // _lanes(call), 1 if _element(call) == 0 else 2
    code = _kernel("forward", _choices(call) | {"BACK": int(call.backward)})
    most = 1
    while most < groups and most * ahead < call.size("N"):
        most *= 2
    return [
        Launch(code, -(-call.rows // (groups // across)), _FORWARD_THREADS, arguments=(across,))
        for across in dict.fromkeys((most, 1))
    ]


def _backward(call: Call, tile: int) -> Launch:
    choices = {name: value for name, value in _choices(call).items() if name != "NORM"}
    code = _kernel("backward", choices | {"SUMS": int("grad_weight" in call.wanted)})
    return Launch(code, -(-call.rows * call.size("N") // tile), _BACKWARD_THREADS, arguments=(tile,))


def _steps(call: Call, *strides: tuple[int, int]) -> tuple[int, ...]:
    """How a group of backward.cu goes on: positions, heads, and for each pair of strides the elements without and with a wrap."""
    heads = call.size("N")
    whole, more = divmod(_BACKWARD_THREADS // _lanes(call), heads)
    steps = [(whole * row + more * head, (whole + 1) * row + (more - heads) * head) for row, head in strides]
    return (whole, more, *(number for step in steps for number in step))


def _shares(call: Call, rows: int) -> tuple[int, ...]:
    """Rows of heads of a block that adds nothing up: short where there are few, so that every multiprocessor has some."""
    return (TILE, _LEAST_SHARE) if rows >= 8 * TILE * call.device.multiprocessors else (_LEAST_SHARE, TILE)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
