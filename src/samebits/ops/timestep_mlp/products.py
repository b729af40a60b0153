"""The products of FP32 layers: x @ weight^T + bias, grad @ weight, grad^T @ x. Which kernel runs each, and its launch.

What ``timestep_mlp`` and ``fp32_linear`` are made of; the kernels are in this folder. Axes and inputs go by the caller's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from samebits.audit.build import Build
from samebits.contract import OpSpec
from samebits.dispatch import Call
from samebits.ops.timestep_mlp import tiles
from samebits.ops.timestep_mlp.tiles import CHUNK, Steps
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_SPLIT_ROWS, _MOST_SPLIT_ROWS = 192, 1024
"""Up to here the chunks of a product with a transposed weight are, and may be, spread over blocks and folded by a second kernel."""
_STREAM_ROWS = 8
"""Up to here the forward streams the weights, where columns are enough for every multiprocessor."""
_FEW_ROWS = 16
"""Up to here the weights are streamed, once for every 8 rows, where no tile may be taken."""
_HEIGHTS = (1, 4, 8)
"""Rows that a warp may take."""
_NARROW_STRIDE = 2**28
"""Eight rows closer than this have 32-bit offsets from the first."""


@dataclass(frozen=True)
class Plan:
    """Launches by what they do; absent where nothing asks for them."""

    steps: Steps

    def __iter__(self) -> Iterator[Launch]:
        return (step for _, step in self.steps)

    def __str__(self) -> str:
        return "; then ".join(f"{name}: {step}" for name, step in self.steps)

    def __getitem__(self, name: str) -> Launch:
        return dict(self.steps)[name]

    def __contains__(self, name: str) -> bool:
        return name in dict(self.steps)


@dataclass(frozen=True)
class Shape:
    """How a block of linear.cu is cut: results of a warp, warps, and how many of these lie over rows."""

    rows: int
    cols: int
    warps: int
    row_warps: int


_MANY = Shape(rows=8, cols=8, warps=16, row_warps=4)
"""Square tiles: what a block reads is read for 32 rows and 32 columns."""


def _few(height: int) -> Shape:
    """The weight streams past ``height`` rows at a time."""
    return Shape(rows=height, cols=2, warps=4, row_warps=1)


# --- which shapes, best first -----------------------------------------------------------------------------------------


def forward_shapes(rows: int) -> list[Shape]:
    """How blocks of linear.cu may be cut for this many rows. Four passes of a row's four were faster than two of eight."""
    heights = _heights(rows) if rows <= _HEIGHTS[-1] else dict.fromkeys((4, *_heights(rows)))
    few = [_few(height) for height in heights]
    return [*few, _MANY] if rows <= _FEW_ROWS else [_MANY, *few]


def backward_heights(rows: int) -> list[int]:
    """Rows of a warp where the chunks of a sum are spread over blocks; 0 where each block takes all of them."""
    spread = list(_heights(rows)) if rows <= _MOST_SPLIT_ROWS else []
    return [*spread, 0] if rows <= _SPLIT_ROWS else [0, *spread]


def _heights(rows: int) -> dict[int, None]:
    least = next((height for height in _HEIGHTS if rows <= height), _HEIGHTS[-1])
    return dict.fromkeys((least, *_HEIGHTS))


# --- planning ---------------------------------------------------------------------------------------------------------


def linear(call: Call, name: str, summed: str, out: str, inputs: tuple[str, ...], silu: int) -> list[Steps]:
    """Ways to x @ weight^T + bias, best first."""
    few = _few(1)
    direct: list[Steps] = [
        ((name, _linear(call, shape, summed, out, inputs, silu)),) for shape in forward_shapes(call.rows)
    ]
    tiled = tiles.linear(call, name, summed, out, inputs, silu)
    blocks = -(-call.size(out) // (few.cols * few.warps))
    if call.rows <= _STREAM_ROWS and blocks >= call.device.multiprocessors:
        return [*direct, *tiled]
    return [*tiled, *direct]


def across(call: Call, name: str, summed: str, out: str, inputs: tuple[str, ...], slope: int) -> list[Steps]:
    """Ways to grad @ weight, best first."""
    direct = [_across(call, name, summed, out, inputs, height, slope) for height in backward_heights(call.rows)]
    return [*tiles.across(call, name, summed, out, inputs, slope), *direct]


def weight_gradient(
    call: Call, name: str, weight: str, bias: str, out: str, inner: str, inputs: tuple[str, ...]
) -> list[Steps]:
    """Ways to grad^T @ given and the sum of grad, best first."""
    direct: Steps = ((name, _weight_gradient(call, weight, bias, out, inner, inputs)),)
    return [*tiles.weight_gradient(call, name, weight, bias, out, inner, inputs), direct]


def builds(spec: OpSpec, plans: Callable[[Call], tuple[Plan, ...]], activated: bool) -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    found = {build.kernel: build for build in cuda_builds(spec, plans)}
    contracts = tuple(contract.name for contract in spec.contracts)
    for kernel in tiles.kernels(activated):
        found.setdefault(kernel, Build(kernel, contracts))
    return tuple(found[kernel] for kernel in sorted(found, key=lambda kernel: kernel.name))


def together(*parts: list[Steps]) -> tuple[Plan, ...]:
    """Plans of several products: the best way to each, then the other ways, side by side."""
    parts = tuple(part for part in parts if part)
    count = max(map(len, parts), default=1)
    return tuple(dict.fromkeys(Plan(sum((part[min(i, len(part) - 1)] for part in parts), ())) for i in range(count)))


def _linear(call: Call, shape: Shape, summed: str, out: str, inputs: tuple[str, ...], silu: int) -> Launch:
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


def _across(call: Call, name: str, summed: str, out: str, inputs: tuple[str, ...], height: int, slope: int) -> Steps:
    terms, columns, rows = call.size(summed), call.size(out), call.rows
    chunks = -(-terms // CHUNK)
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
    return tuple(steps)


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


def _vec(call: Call, widths: tuple[int, ...], inputs: tuple[str, ...]) -> int:
    """16-byte accesses are legal: rows are whole vectors, and these inputs are aligned. What we allocate always is."""
    return 8 if all(width % 4 == 0 for width in widths) and all(call.layout(name).aligned for name in inputs) else 1


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel("timestep_mlp", entry, tuple(sorted(choices.items())))


# --- launching --------------------------------------------------------------------------------------------------------


def run_linear(plan: Plan, name: str, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, act: Tensor | None) -> None:
    step, (rows, size), columns = plan[name], x.shape, weight.shape[0]
    out: tuple[Tensor | int, ...] = (y, 0 if act is None else act)
    given = (x, x.stride(0), weight, weight.stride(0))
    if f"{name} fold" in plan:
        fold = plan[f"{name} fold"]
        parts = x.new_empty(dict(fold.kernel.defines)["PARTS"], rows, columns)
        launch(step, *given, parts, rows, columns, size)
        launch(fold, parts, bias, *out, rows, columns)
    else:
        launch(step, *given, bias, *out, rows, columns, size, *step.arguments)


def run_across(plan: Plan, name: str, grad: Tensor, weight: Tensor, pre: Tensor | None, out: Tensor) -> None:
    step, (rows, terms), columns = plan[name], grad.shape, weight.shape[1]
    chunks = -(-terms // CHUNK)
    split = f"{name} fold" in plan
    sums = grad.new_empty(chunks, rows, columns) if split else out
    sloped = (0, 0) if pre is None else (pre, pre.stride(0))
    given = (grad, grad.stride(0), weight, weight.stride(0))
    launch(step, *given, *sloped, sums, rows, terms, columns, *step.arguments)
    if split:
        launch(plan[f"{name} fold"], sums, *sloped, out, rows, columns, chunks)


def run_weight_gradient(
    step: Launch, grad: Tensor, given: Tensor, weight_out: Tensor | None, bias_out: Tensor | None
) -> None:
    out = (0 if weight_out is None else weight_out, 0 if bias_out is None else bias_out)
    sizes = (grad.shape[0], grad.shape[1], given.shape[1])
    launch(step, grad, grad.stride(0), given, given.stride(0), *out, *sizes, *step.arguments)
