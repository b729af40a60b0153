"""CUDA backend of ``linear``: which kernels run a call, and their launches. Every plan of a call has the same bits.

``gemm_wgmma.cu`` (:mod:`samebits.ops.linear.wgmma`) and ``gemm.cu`` do all three products, ``grad_bias.cu`` the fold. A product is
planned as a :class:`_Product`; another kernel for the same products is another :class:`Launch` behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call, other_tensor_core
from samebits.ops.linear import wgmma
from samebits.ops.linear.spec import SPEC
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

GPU_ONLY = (wgmma.ENTRY,)
"""Kernels that no emulator runs: what they do is shown on a GPU alone, where every plan is compared with the reference."""
FEW = 64
"""Rows up to which the weight takes the large side of a tile."""
BAND = 8
"""Tiles of the A side that are worked on together."""
_GRID = 2**31 - 1
_STAGE = 64
"""Reduction indices of a stage."""
_WARP = 32
"""Threads and outputs of a block of grad_bias.cu."""


@dataclass(frozen=True)
class Shape:
    """How a block of gemm.cu is cut; the names are those of its macros."""

    MT: int
    NT: int
    WM: int
    WN: int
    STAGES: int
    BLOCKS: int
    """Blocks that share a multiprocessor."""

    @property
    def rows(self) -> int:
        return 16 * self.MT * self.WM

    @property
    def columns(self) -> int:
        return 8 * self.NT * self.WN

    @property
    def threads(self) -> int:
        return 32 * self.WM * self.WN

    @property
    def shared(self) -> int:
        return 2 * self.STAGES * (self.rows + self.columns) * _STAGE


LARGE, MEDIUM, SMALL = Shape(4, 8, 2, 4, 4, 1), Shape(4, 8, 2, 2, 3, 2), Shape(2, 8, 2, 2, 3, 3)
GENERAL = {LARGE: 1.0, MEDIUM: 0.95, SMALL: 0.75}
"""128 x 256, 128 x 128 and 64 x 128, and how much of the rate of the first each is expected to reach when the GPU is full."""
ODD = Shape(2, 4, 2, 2, 3, 2)
"""For operands that must be read element by element; that takes registers."""
NARROW = {8: Shape(1, 1, 2, 1, 12, 2), 16: Shape(1, 2, 2, 1, 12, 2), 64: Shape(1, 8, 4, 1, 6, 2)}
WIDE = {8: Shape(1, 1, 8, 1, 4, 2), 16: Shape(1, 2, 8, 1, 4, 2), 64: Shape(2, 8, 4, 1, 4, 2)}
"""For up to so many rows: 32 (or 64) and 128 outputs of a block. Narrow blocks where there are too few outputs to give every
multiprocessor a wide one."""


@dataclass(frozen=True)
class Plan:
    """The launches of a call; what its direction or its wanted results do not need is None."""

    y: Launch | None = None
    grad_x: Launch | None = None
    grad_weight: Launch | None = None
    grad_bias: Launch | None = None

    def __iter__(self) -> Iterator[Launch]:
        yield from (step for step in vars(self).values() if step is not None)

    def __str__(self) -> str:
        return "; then ".join(str(step) for step in self)


def refuses(call: Call) -> str | None:
    """Why this architecture does not get the contract, or None."""
    return other_tensor_core(call)


@dataclass(frozen=True)
class _Product:
    """out (rows, columns) = A (rows, size) B (columns, size)^T, and how a kernel is told of it."""

    rows: int
    columns: int
    size: int
    turned_a: bool
    turned_b: bool
    few: bool
    """The rows are those of the batch, and there may be few of them."""
    dtype: str
    wide: bool
    """The result is FP32."""
    vec: int
    """8 where both operands can be read in 16-byte pieces, else 1."""
    boxes: bool
    """Whether the copy engine can read both, and results can be stored eight at a time."""
    multiprocessors: int

    def launches(self) -> list[Launch]:
        """Every launch that may compute it, best first."""
        if self.vec == 1:
            return [self._straight(ODD)]
        general = [self._straight(shape) for shape in sorted(GENERAL, key=self._cost)]
        if self.boxes:
            general = self._by_warpgroups() + general
        if not self.few:
            return general
        fitting = next((limit for limit in NARROW if self.rows <= limit), max(NARROW))
        wide = self.columns >= WIDE[fitting].rows * self.multiprocessors
        crosswise = [self._crosswise(kind[fitting]) for kind in ((WIDE, NARROW) if wide else (NARROW, WIDE))]
        return crosswise + general if self.rows <= FEW else general + crosswise

    def _by_warpgroups(self) -> list[Launch]:
        return _by_warpgroups([self])

    def sides(self, tile: wgmma.Tile) -> wgmma.Sides:
        if tile.CROSS:
            return wgmma.Sides(self.columns, self.rows, self.size, self.turned_b, self.turned_a)
        return wgmma.Sides(self.rows, self.columns, self.size, self.turned_a, self.turned_b)

    def _cost(self, shape: Shape) -> float:
        """Time of the multiprocessor with the most tiles, in products. One that holds fewer blocks than it could is slower."""
        tiles = -(-self.rows // shape.rows) * -(-self.columns // shape.columns)
        own = -(-tiles // self.multiprocessors)
        rate = GENERAL[shape] * (1 + min(1, own / shape.BLOCKS)) / 2
        return own * shape.rows * shape.columns / rate

    def _straight(self, shape: Shape) -> Launch:
        return self._launch(shape, self.rows, self.columns, self.turned_a, self.turned_b, cross=False)

    def _crosswise(self, shape: Shape) -> Launch:
        """The columns of the result, which are rows of the weight or its columns, on the A side."""
        return self._launch(shape, self.columns, self.rows, self.turned_b, self.turned_a, cross=True)

    def _launch(self, shape: Shape, rows: int, columns: int, turned_a: bool, turned_b: bool, cross: bool) -> Launch:
        tiles = -(-rows // shape.rows) * -(-columns // shape.columns)
        defines = vars(shape) | {
            "ELEMENT": ELEMENTS[self.dtype], "TA": int(turned_a), "TB": int(turned_b), "CROSS": int(cross), "VEC": self.vec,
        }  # fmt: skip
        kernel = CudaKernel("linear", "gemm", tuple(sorted(defines.items())))
        return Launch(kernel, min(tiles, _GRID), shape.threads, shape.shared, arguments=(int(cross), BAND))


def _by_warpgroups(products: Sequence[_Product]) -> list[Launch]:
    """Launches that compute all of them at once, best first; they differ in their rows and columns alone."""
    like = products[0]
    ways = [(tile, [each.sides(tile) for each in products]) for tile in (wgmma.BATCH if like.few else wgmma.WEIGHT)]
    ordered = wgmma.ordered(ways, like.few, like.wide, like.multiprocessors)
    return [wgmma.planned(tile, sides, like.dtype, like.wide, like.multiprocessors) for tile, sides in ordered]


def plans(call: Call) -> tuple[Plan, ...]:
    if not call.backward:
        return tuple(Plan(y=step) for step in _product(call, "y").launches())
    xs, weights, biases = [], [], []
    if "grad_x" in call.wanted:
        xs = _product(call, "grad_x").launches()
    if "grad_weight" in call.wanted:
        weights = _product(call, "grad_weight").launches()
    if "grad_bias" in call.wanted:
        biases = _folds(call)
    count = max(len(xs), len(weights), len(biases), 1)

    def at(steps: list[Launch], index: int) -> Launch | None:
        return steps[index % len(steps)] if steps else None

    return tuple(Plan(grad_x=at(xs, i), grad_weight=at(weights, i), grad_bias=at(biases, i)) for i in range(count))


_OPERANDS = {"y": ("x", "weight"), "grad_x": ("grad_y", "weight"), "grad_weight": ("grad_y", "x")}
"""Of the products, by their results."""


def _product(call: Call, result: str) -> _Product:
    operands, over_rows, (n, k) = _OPERANDS[result], result == "grad_weight", (call.size("N"), call.size("K"))
    layouts = [call.layout(name) for name in operands]
    dense = [n if name == "grad_y" else k for name in operands]
    vectors = all(size % 8 == 0 for size in dense) and all(layout.aligned for layout in layouts)
    columns = k if call.backward else n
    apart = all(layout.strides[0] >= size for layout, size in zip(layouts, dense, strict=True))
    return _Product(
        rows=n if over_rows else call.rows,
        columns=columns,
        size=_reduced(call, result),
        turned_a=over_rows,
        turned_b=call.backward,
        few=not over_rows,
        dtype=layouts[0].dtype,
        wide=(call.grad_dtype if call.backward else call.out_dtype) == "float32",
        vec=8 if vectors else 1,
        boxes=vectors and apart and columns % 8 == 0 and 0 < call.rows < 2**30,
        multiprocessors=max(call.device.multiprocessors, 1),
    )


def _folds(call: Call) -> list[Launch]:
    """Every launch that may compute grad_bias, best first. Few blocks need more rows on their way; many are slower with more."""
    grad, outputs = call.layout("grad_y"), call.size("N")
    blocks = -(-outputs // _WARP)

    def step(vec: int, rows: int, stages: int) -> Launch:
        defines = {"ELEMENT": ELEMENTS[grad.dtype], "VEC": vec, "ROWS": rows, "STAGES": stages}
        kernel = CudaKernel("linear", "grad_bias", tuple(sorted(defines.items())))
        return Launch(kernel, blocks, _WARP, 2 * stages * rows * _WARP)

    by_element, deep, shallow = step(1, 32, 0), step(8, 64, 8), step(8, 64, 4)
    if outputs % 8 != 0 or not grad.aligned:
        return [by_element]
    few = blocks <= 2 * call.device.multiprocessors
    return [*((deep, shallow) if few else (shallow, deep)), by_element]


def _reduced(call: Call, result: str) -> int:
    """Reduction indices."""
    return call.rows if result == "grad_weight" else call.size("K" if result == "y" else "N")


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    rows, outputs, size = call.rows, *weight.shape
    if plan.y is not None:
        _multiply(plan.y, results["y"], x, weight, inputs.get("bias", 0), 0, (rows, outputs, size))
    if not call.backward:
        return
    grad = inputs["grad_y"]
    if plan.grad_x is not None:
        _multiply(plan.grad_x, results["grad_x"], grad, weight, 0, 0, (rows, size, outputs))
    if plan.grad_weight is not None:
        start = inputs.get("start_weight", 0)
        _multiply(plan.grad_weight, results["grad_weight"], grad, x, 0, start, (outputs, size, rows))
    if plan.grad_bias is not None:
        start = inputs.get("start_bias", 0)
        launch(plan.grad_bias, results["grad_bias"], grad, grad.stride(0), start, rows, outputs)


def _multiply(
    step: Launch,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | int,
    start: Tensor | int,
    sizes: tuple[int, int, int],
) -> None:
    """out (rows, columns), ``sizes`` = (rows, columns, reduction indices)."""
    rows, columns, size = sizes
    cross, band = step.arguments
    if cross:
        a, b, rows, columns = b, a, columns, rows
    if step.kernel.entry == wgmma.ENTRY:
        wgmma.multiply(step, (wgmma.Product(out, a, b, bias, rows, columns),), size, start)
        return
    wide = int(out.element_size() == 4)
    start_line = start.stride(0) if isinstance(start, Tensor) else 0
    launch(step, out, a, a.stride(0), b, b.stride(0), bias, start, start_line, rows, columns, size, wide, band)


# --- several calls ----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A launch for one result of several calls."""

    result: str
    launch: Launch
    a: str
    b: str
    """The inputs that are its sides."""
    sizes: tuple[tuple[int, int], ...]
    """Rows of the two, for each call."""
    size: int
    """Reduction indices."""


class Together(NamedTuple):
    """The launches of several calls that want the same results."""

    steps: tuple[Step, ...]
    rest: tuple[Plan | None, ...]
    """What is left of each call's own plan, if anything."""


def together(calls: Sequence[Call], plans: Sequence[Plan]) -> Together:
    """``plans``: what each call would run alone."""
    steps = []
    for name, (a, b) in _OPERANDS.items():
        if name not in calls[0].wanted:
            continue
        products = [_product(call, name) for call in calls]
        step = _at_once(products)
        if step is None:
            continue
        sizes = tuple((each.rows, each.columns) for each in products)
        if step.arguments[0]:
            a, b, sizes = b, a, tuple(pair[::-1] for pair in sizes)
        steps.append(Step(name, step, a, b, sizes, products[0].size))
    without = dict.fromkeys((step.result for step in steps), None)
    rest = (replace(plan, **without) for plan in plans)
    return Together(tuple(steps), tuple(plan if any(plan) else None for plan in rest))


def _at_once(products: Sequence[_Product]) -> Launch | None:
    """One launch for all, or None where they need several."""
    few = any(each.few and each.rows <= FEW for each in products)
    if not 1 < len(products) <= wgmma.GROUPS or few or not all(each.boxes for each in products):
        return None
    alike = {(each.size, each.dtype, each.wide) for each in products}
    return _by_warpgroups(products)[0] if len(alike) == 1 else None


def run_together(
    calls: Sequence[Call],
    plan: Together,
    inputs: Sequence[dict[str, Tensor]],
    results: Sequence[dict[str, Tensor]],
) -> None:
    for name, step, a, b, sizes, size in plan.steps:
        products = [
            wgmma.Product(made[name], given[a], given[b], given.get("bias", 0), rows, columns)
            for made, given, (rows, columns) in zip(results, inputs, sizes, strict=True)
        ]
        wgmma.multiply(step, products, size)
    for call, rest, given, made in zip(calls, plan.rest, inputs, results, strict=True):
        if rest is not None:
            run(call, rest, given, made, {})


def builds() -> tuple[Build, ...]:
    """Every kernel that a call, or several at once, can reach, for the audit."""
    alone = cuda_builds(SPEC, plans)
    several = tuple(Build(kernel, each.contracts) for each in alone if (kernel := _of_several(each.kernel)) is not None)
    return tuple(sorted((*alone, *several), key=lambda each: each.kernel.name))


def _of_several(kernel: object) -> CudaKernel | None:
    """The form of a kernel that computes several products, where there is one."""
    if not isinstance(kernel, CudaKernel) or kernel.entry != wgmma.ENTRY:
        return None
    macros = dict(kernel.defines)
    if macros["WIDE"]:
        return None  # several results are asked for in the dtype of x alone
    return replace(kernel, defines=tuple(sorted((macros | {"GROUPS": wgmma.GROUPS}).items())))
