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
_FORWARD_USUAL, _FORWARD_MOST = 128, 256
_FEW, _MANY = 128, 512
"""Threads of a block of forward.cu, and of backward.cu."""
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
        return tuple((_backward(call, tile, _FEW),) for tile in _shares(call, rows))
    columns = _lanes(call) * 8
    fold = Launch(_kernel("fold_weight", {"ELEMENT": _element(call)}), columns // 8, 256)
    tried = [_backward(call, TILE, threads) for threads in _threads(call)]
    return tuple((step, fold) for step in tried if step.shared <= call.device.shared_bytes)


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
    given = (grad, grad.stride(0), grad.stride(1), x, x.stride(0), x.stride(1), inputs["weight"], *angles)
    tiles, columns = -(-call.rows * call.size("N") // TILE), _lanes(call) * 8
    partials = rstd.new_empty(tiles, columns) if "grad_weight" in results else 0
    saved = (rstd, rstd.stride(0), results.get("grad_x", 0), partials)
    stride = step.block // _lanes(call) * _each(call)
    steps = _steps(call, stride, (grad.stride(0), grad.stride(1)), (x.stride(0), x.stride(1)), (rstd.stride(0), 1))
    launch(step, *given, *saved, *sizes, *step.arguments, *steps)
    for fold in plan[1:]:
        launch(fold, partials, results["grad_weight"], int(_own(call)), tiles, columns, call.size("D"))


# --- what a call needs ------------------------------------------------------------------------------------------------


def _norms(call: Call) -> bool:
    return call.op != "rope_3axis"


def _ropes(call: Call) -> bool:
    return call.op != "qk_rmsnorm"


def _element(call: Call) -> int:
    return ELEMENTS[call.layouts[0][1].dtype]


def _lanes(call: Call) -> int:
    """Of a row. What the others of thirty-two would add is +0, so the bits are the same; element by element they leave the
    backward registers enough."""
    by_elements = call.backward and _norms(call) and _vector_access(call) == 1
    return 16 if call.size("D") <= _NARROW and not by_elements else 32


def _vector_access(call: Call) -> int:
    """8 where 16-byte accesses are legal for every row and every result, and the columns of a vector are rotated alike, else 1."""
    whole = call.size("D") % 8 == 0 and (not _ropes(call) or call.size("R") % 16 == 0)
    return 8 if whole and all(layout.aligned for name, layout in call.layouts if name != "rstd") else 1


def _full(call: Call) -> bool:
    """Every thread of a row has eight columns, in vectors."""
    return _vector_access(call) == 8 and call.size("D") == _lanes(call) * 8


def _each(call: Call) -> int:
    """Neighbouring heads that a group of threads of backward.cu has at a time; they are of one position."""
    return 2 if _full(call) and _element(call) != 0 and call.size("N") % 2 == 0 else 1


def _own(call: Call) -> bool:
    """Gradients in the element type, if that is not FP32."""
    return call.grad_dtype != "float32" and _element(call) != 0


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel(_OP, entry, tuple(sorted(choices.items())))


def _choices(call: Call) -> dict[str, int]:
    return {
        "ELEMENT": _element(call),
        "VEC": _vector_access(call),
        "LANES": _lanes(call),
        "FULL": int(_full(call)),
        "ROPE": int(_ropes(call)),
    }


def _forward(call: Call) -> list[Launch]:
    """As many groups of threads as a position has heads for, in the fewest turns; several positions where these are few."""
    lanes, each = _lanes(call), 7 if _full(call) and _element(call) != 0 else 4
    code = _kernel("forward", _choices(call) | {"NORM": int(_norms(call)), "BACK": int(call.backward)})
    heads, most = call.size("N"), _FORWARD_MOST // lanes
    turns = -(-heads // (most * each))
    across = -(-heads // (turns * each))
    found = []
    for groups in dict.fromkeys((max(_FORWARD_USUAL // lanes, across), most)):
        positions = groups // across
        threads = -(-positions * across * lanes // 32) * 32
        found.append(Launch(code, -(-call.rows // positions), threads, arguments=(across,)))
    return found


def _threads(call: Call) -> tuple[int, ...]:
    """Of a block of backward.cu that adds terms up: the fewer the tiles, the more threads share one."""
    each_has = -(-call.rows * call.size("N") // TILE) / call.device.multiprocessors
    usual = _MANY if each_has <= 1 else 2 * _FEW if each_has <= 3 else _FEW
    most = _MANY if _full(call) else 2 * _FEW
    return tuple(dict.fromkeys(min(threads, most) for threads in (usual, _FEW, 2 * _FEW, _MANY)))


def _backward(call: Call, tile: int, threads: int) -> Launch:
    sums, each, size = "grad_weight" in call.wanted, _each(call), 4 if _element(call) == 0 else 2
    code = _kernel("backward", _choices(call) | {"EACH": each, "OWN": int(_own(call)), "SUMS": int(sums)})
    flight = threads * each * 2 * 8 * size
    row = threads * 8 * size if _vector_access(call) == 1 and _ropes(call) else 0
    terms = 2 * threads * each * 8 * 4 if sums else 0
    shared = flight + row + terms
    return Launch(code, -(-call.rows * call.size("N") // tile), threads, shared, arguments=(tile,))


def _steps(call: Call, stride: int, *strides: tuple[int, int]) -> tuple[int, ...]:
    """How a group of backward.cu goes on: positions, heads, and for each pair of strides the elements without and with a wrap."""
    heads = call.size("N")
    whole, more = divmod(stride, heads)
    steps = [(whole * row + more * head, (whole + 1) * row + (more - heads) * head) for row, head in strides]
    return (whole, more, *(number for step in steps for number in step))


def _shares(call: Call, rows: int) -> tuple[int, ...]:
    """Rows of heads of a block that adds nothing up: short where there are few, so that every multiprocessor has some."""
    return (TILE, _LEAST_SHARE) if rows >= 8 * TILE * call.device.multiprocessors else (_LEAST_SHARE, TILE)


BETWEEN = {"D": (192,)}
"""For the sweep: columns that thirty-two threads hold in vectors, though not all of them."""


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans, BETWEEN)
