"""CUDA backend of ``timestep_mlp``: which kernels run a call, and their launches. Every plan of a call has the same bits.

Floors at 256 -> 5376 -> 2688: the weights are 63.3 MB, so forward and the two products with their transposes take 15 us each at
4.2 TB/s as long as rows are few; writing their gradients takes as long again. Many rows are bound by arithmetic: 31 MFLOP per
row forward, twice that backward, at 67 TFLOP/s of FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.timestep_mlp.spec import SPEC
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_CHUNK = 64
_SPLIT_ROWS, _MOST_SPLIT_ROWS = 192, 1024
"""Up to here the chunks of a product with a transposed weight are, and may be, spread over blocks and folded by a second kernel."""
_FEW_ROWS = 16
"""Up to here the forward streams the weights, once for every 8 rows."""
_HEIGHTS = (1, 4, 8)
"""Rows that a warp may take."""
_NARROW_STRIDE = 2**28
"""Eight rows closer than this have 32-bit offsets from the first."""


@dataclass(frozen=True)
class Plan:
    """Launches by what they do; absent where nothing asks for them."""

    steps: tuple[tuple[str, Launch], ...]

    def __iter__(self) -> Iterator[Launch]:
        return (step for _, step in self.steps)

    def __str__(self) -> str:
        return "; then ".join(f"{name}: {step}" for name, step in self.steps)

    def __getitem__(self, name: str) -> Launch:
        return dict(self.steps)[name]

    def __contains__(self, name: str) -> bool:
        return name in dict(self.steps)


def plans(call: Call) -> tuple[Plan, ...]:
    least = next((height for height in _HEIGHTS if call.rows <= height), _HEIGHTS[-1])
    heights = dict.fromkeys((least, *_HEIGHTS))
    if call.backward:
        spread = [_backward(call, height) for height in heights] if call.rows <= _MOST_SPLIT_ROWS else []
        options = [*spread, _backward(call, 0)] if call.rows <= _SPLIT_ROWS else [_backward(call, 0), *spread]
    else:
        few = [_forward(call, _few(height)) for height in heights]
        options = [*few, _forward(call, _MANY)] if call.rows <= _FEW_ROWS else [_forward(call, _MANY), *few]
    return tuple(dict.fromkeys(Plan(tuple(steps)) for steps in options))


# --- forward ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """How a block of linear.cu is cut: results of a warp, warps, and how many of these lie over rows."""

    rows: int
    cols: int
    warps: int
    row_warps: int


_MANY = _Shape(rows=8, cols=8, warps=16, row_warps=4)
"""Square tiles: what a block reads is read for 32 rows and 32 columns."""


def _few(height: int) -> _Shape:
    """The weight streams past ``height`` rows at a time."""
    return _Shape(rows=height, cols=2, warps=4, row_warps=1)


def _forward(call: Call, shape: _Shape) -> list[tuple[str, Launch]]:
    first = _linear(call, shape, "K", "F", ("x", "w1"), silu=1)
    return [("first", first), ("second", _linear(call, shape, "F", "D", ("w2",), silu=0))]


def _linear(call: Call, shape: _Shape, summed: str, out: str, inputs: tuple[str, ...], silu: int) -> Launch:
    vec = _vec(call, (call.size(summed),), inputs)
    if shape is _MANY and (vec == 1 or any(call.layout(name).strides[0] >= _NARROW_STRIDE for name in inputs)):
        shape = _few(_HEIGHTS[-1])
    defines = {
        "ROWS": shape.rows,
        "COLS": shape.cols,
        "THREADS": 32 * shape.warps,
        "STREAM": int(shape is not _MANY),
        "SILU": silu,
        "VEC": vec,
    }
    row_tiles = -(-call.rows // (shape.rows * shape.row_warps))
    column_tiles = -(-call.size(out) // (shape.cols * shape.warps // shape.row_warps))
    grid = (row_tiles, column_tiles)
    return Launch(_kernel("linear", defines), grid, 32 * shape.warps, arguments=(shape.row_warps,))


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(call: Call, height: int) -> list[tuple[str, Launch]]:
    """``height``: rows of a warp where the chunks of a sum are spread over blocks; 0 where each block takes all of them."""
    wanted = set(call.wanted)
    steps: list[tuple[str, Launch]] = []
    if wanted & {"grad_w2", "grad_b2"}:
        steps.append(("second", _weight_gradient(call, "w2", "b2", "D", "F", ("grad_y", "act"))))
    if wanted & {"grad_x", "grad_w1", "grad_b1"}:
        steps += _across(call, "pre", "D", "F", ("grad_y", "w2", "pre"), height, slope=1)
    if wanted & {"grad_w1", "grad_b1"}:
        steps.append(("first", _weight_gradient(call, "w1", "b1", "F", "K", ("x",))))
    if "grad_x" in wanted:
        steps += _across(call, "x", "F", "K", ("w1",), height, slope=0)
    return steps


def _across(
    call: Call, name: str, summed: str, out: str, inputs: tuple[str, ...], height: int, slope: int
) -> list[tuple[str, Launch]]:
    terms, columns, rows = call.size(summed), call.size(out), call.rows
    chunks = -(-terms // _CHUNK)
    split = height > 0 and chunks > 1
    height = height if split else _HEIGHTS[-1]
    row_warps = min(8, 1 << (max(1, -(-rows // height)) - 1).bit_length())
    column_blocks = -(-columns // (128 * (8 // row_warps)))
    row_tiles = -(-rows // (height * row_warps))
    defines = {
        "ROWS": height,
        "SPLIT": int(split),
        "SLOPE": 0 if split else slope,
        "VEC": _vec(call, (terms, columns), inputs),
    }
    grid = (row_tiles * (chunks if split else 1), column_blocks)
    steps = [(name, Launch(_kernel("across", defines), grid, 256, arguments=(chunks, row_warps)))]
    if split:
        fold = Launch(_kernel("fold_chunks", {"SLOPE": slope}), -(-rows * columns // 256), 256, arguments=(chunks,))
        steps.append((f"{name} fold", fold))
    return steps


def _weight_gradient(call: Call, weight: str, bias: str, out: str, inner: str, inputs: tuple[str, ...]) -> Launch:
    outputs, columns = call.size(out), call.size(inner)
    defines = {
        "WEIGHT": int(f"grad_{weight}" in call.wanted),
        "BIAS": int(f"grad_{bias}" in call.wanted),
        "VEC": _vec(call, (outputs, columns), inputs),
    }
    column_blocks = -(-columns // 128) if defines["WEIGHT"] else 1
    return Launch(
        _kernel("weight_gradient", defines), column_blocks * -(-outputs // 64), 256, arguments=(column_blocks,)
    )


# --- launching --------------------------------------------------------------------------------------------------------


def run(
    call: Call,
    plan: Plan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    if not call.backward:
        pre, act = results["pre"], results["act"]
        _run_linear(plan["first"], x, w1, inputs["b1"], pre, act)
        _run_linear(plan["second"], act, w2, inputs["b2"], results["y"], None)
        return
    grad_y = inputs["grad_y"]
    if "second" in plan:
        _run_weight_gradient(plan["second"], grad_y, inputs["act"], results.get("grad_w2"), results.get("grad_b2"))
    if "pre" not in plan:
        return
    grad_pre = grad_y.new_empty(call.rows, call.size("F"))
    _run_across(plan, "pre", grad_y, w2, inputs["pre"], grad_pre)
    if "first" in plan:
        _run_weight_gradient(plan["first"], grad_pre, x, results.get("grad_w1"), results.get("grad_b1"))
    if "x" in plan:
        _run_across(plan, "x", grad_pre, w1, None, results["grad_x"])


def _run_linear(step: Launch, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, act: Tensor | None) -> None:
    sizes = (x.shape[0], weight.shape[0], weight.shape[1])
    out = (y, 0 if act is None else act)
    launch(step, x, x.stride(0), weight, weight.stride(0), bias, *out, *sizes, *step.arguments)


def _run_across(plan: Plan, name: str, grad: Tensor, weight: Tensor, pre: Tensor | None, out: Tensor) -> None:
    step, (rows, terms), columns = plan[name], grad.shape, weight.shape[1]
    chunks, row_warps = step.arguments
    split = f"{name} fold" in plan
    sums = grad.new_empty(chunks, rows, columns) if split else out
    sloped = (0, 0) if pre is None else (pre, pre.stride(0))
    given = (grad, grad.stride(0), weight, weight.stride(0))
    launch(step, *given, *sloped, sums, rows, terms, columns, chunks, row_warps)
    if split:
        launch(plan[f"{name} fold"], sums, *sloped, out, rows, columns, chunks)


def _run_weight_gradient(
    step: Launch, grad: Tensor, given: Tensor, weight_out: Tensor | None, bias_out: Tensor | None
) -> None:
    out = (0 if weight_out is None else weight_out, 0 if bias_out is None else bias_out)
    sizes = (grad.shape[0], grad.shape[1], given.shape[1])
    launch(step, grad, grad.stride(0), given, given.stride(0), *out, *sizes, *step.arguments)


def _vec(call: Call, widths: tuple[int, ...], inputs: tuple[str, ...]) -> int:
    """16-byte accesses are legal: rows are whole vectors, and these inputs are aligned. What we allocate always is."""
    return 8 if all(width % 4 == 0 for width in widths) and all(call.layout(name).aligned for name in inputs) else 1


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel("timestep_mlp", entry, tuple(sorted(choices.items())))


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
