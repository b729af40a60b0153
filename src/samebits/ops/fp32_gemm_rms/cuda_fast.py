"""The tensor-core kernels of the fast contracts: raw sums of the projection, and grad_weight.

Floors: both read x once, 2 T K bytes over 4.2 TB/s (32 us at T = 4096, K = 16384); the tensor cores need a little more than
half of that for the three pieces. What is read again comes from the L2 cache: the weight once per tile of tokens,
grad_proj once per tile of columns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from samebits.dispatch import Call, other_tensor_core
from samebits.ops.fp32_gemm_rms.cuda_grads import GradWeightPlan
from samebits.ops.fp32_gemm_rms.cuda_sums import Projection, SumsPlan, stream_strides, streams_of
from samebits.ops.fp32_gemm_rms.fast import CHUNK, SEGMENTS
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel

_WARP, _TILE, _GROUP = 32, 16, 8
"""Lanes of a warp; rows of a tensor-core instruction; its columns."""
_PIECES = 3
_SPLIT_THREADS = 128
_RESERVED = 1024
"""Shared memory that the driver keeps of every block."""


def refuses(call: Call) -> str | None:
    """Why this architecture does not get the fast contracts, or None."""
    return other_tensor_core(call, "the ascending contracts run here") if call.contract.startswith("fast") else None


@dataclass(frozen=True)
class _Shape:
    """How a block of fast_sums.cu or fast_grad_weight.cu is cut; the names are those of their macros."""

    MT: int
    NT: int
    WARPS: int
    TEAMS: int
    KS: int
    STAGES: int
    BLOCKS: int = 1
    SPLIT: int = 0
    """fast_sums.cu reads the weight as BF16 pieces, which split_weight.cu writes before."""

    @property
    def tile(self) -> int:
        """Tokens of a block of fast_sums.cu, columns of one of fast_grad_weight.cu."""
        return _TILE * self.MT * self.WARPS

    @property
    def outputs(self) -> int:
        return _GROUP * self.NT

    @property
    def threads(self) -> int:
        return _WARP * self.WARPS * self.TEAMS

    def level_bytes(self, beside: int) -> int:
        """The sums of one level: those of the outputs and ``beside`` more for each thread of a team."""
        return 4 * (4 * self.MT * self.NT + beside) * _WARP * self.WARPS

    def stages_bytes(self, other_row: int) -> int:
        """``other_row`` is the length in FP32 of what a term of K (or a row) brings beside x."""
        return self.TEAMS * self.STAGES * self.KS * (2 * self.tile + 4 * other_row)

    def kernel(self, entry: str, vec: int) -> CudaKernel:
        return CudaKernel("fp32_gemm_rms", entry, tuple(sorted({**vars(self), "VEC": vec}.items())))


# --- sums -------------------------------------------------------------------------------------------------------------


def sums_plans(projection: Projection) -> tuple[SumsPlan, ...]:
    """Every plan, best first: few tokens want many small blocks, many tokens want their tiles to share the weight."""
    groups = -(-projection.outputs // _GROUP)
    teams = _power_of_two(min(8, _segment_length(projection.size)))
    one = _Shape(MT=1, NT=1, WARPS=1, TEAMS=teams, KS=64, STAGES=4)
    few = _Shape(MT=2, NT=groups, WARPS=1, TEAMS=min(4, teams), KS=32, STAGES=4)
    some = _Shape(MT=2, NT=groups, WARPS=4, TEAMS=1, KS=64, STAGES=3, BLOCKS=2)
    many = [dataclasses.replace(some, STAGES=stages, SPLIT=1) for stages in (3, 2)]
    largest = [plan for shape in many for plan in _divided(projection, shape)]
    ranked = {
        "one": _divided(projection, one)[::-1],
        "few": _divided(projection, few)[::-1],
        "some": _divided(projection, some)[::-1],
        "many": sorted(largest, key=lambda plan: _waste(projection, plan)),
    }
    best = next(
        (name for name, most in (("one", 256), ("few", 512), ("some", 1024)) if projection.rows <= most), "many"
    )
    order = [best, *(name for name in ranked if name != best)]
    return tuple(dict.fromkeys(plan for name in order for plan in ranked[name]))


def _segment_length(size: int) -> int:
    """Chunks of a segment."""
    return -(-size // (CHUNK * SEGMENTS))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _divided(projection: Projection, shape: _Shape) -> list[SumsPlan]:
    """The plans of a shape: first the fewest parts that still give every multiprocessor its blocks, then all of them."""
    tiles = -(-projection.rows // shape.tile) * -(-projection.outputs // shape.outputs)
    slots = shape.BLOCKS * max(1, projection.device.multiprocessors)
    parts = [p for p in (1, 2, 4, 8, 16) if _sums_bytes(shape, p) <= _limit(projection, shape)]
    enough = [p for p in parts if 10 * tiles * p >= 9 * slots]
    chosen = dict.fromkeys([*enough[:1], *parts[-1:]])
    return [_sums_plan(projection, shape, p) for p in chosen]


def _sums_plan(projection: Projection, shape: _Shape, parts: int) -> SumsPlan:
    kernel = shape.kernel("fast_sums", 8 if projection.x_aligned else 1)
    groups = -(-projection.outputs // shape.outputs)
    grid = (-(-projection.rows // shape.tile), parts * groups)
    sums = Launch(kernel, grid, shape.threads, _sums_bytes(shape, parts), (parts,))
    if not shape.SPLIT:
        return SumsPlan(True, parts, (sums,))
    assert groups == 1, "a block reads the pieces of all outputs"
    pitch = -(-projection.size // 8) * 8
    split = CudaKernel("fp32_gemm_rms", "split_weight", ())
    grid = (-(-pitch // (8 * _SPLIT_THREADS)), shape.outputs)
    return SumsPlan(True, parts, (Launch(split, grid, _SPLIT_THREADS, arguments=(shape.outputs, pitch)), sums))


def _sums_bytes(shape: _Shape, parts: int) -> int:
    """Shared memory: the stages, a level for the open segment and for each open subtree, and a meeting place of teams."""
    levels = (SEGMENTS // parts).bit_length() + (shape.TEAMS if shape.TEAMS > 1 else 0)
    weight = 2 * _PIECES * shape.outputs // 4 if shape.SPLIT else shape.outputs
    return shape.stages_bytes(weight) + levels * shape.level_bytes(-(-2 * shape.MT // 4))


def _limit(projection: Projection, shape: _Shape) -> int:
    """What a block may take so that its multiprocessor holds as many as the shape wants."""
    return (projection.device.shared_bytes + _RESERVED) // shape.BLOCKS - _RESERVED


def _waste(projection: Projection, plan: SumsPlan) -> tuple[int, int]:
    """Of the plans for many tokens: whole waves first, then fewer parts to write and read again."""
    step = plan.launches[-1]
    assert isinstance(step.grid, tuple)
    blocks, slots = max(1, step.grid[0] * step.grid[1]), 2 * max(1, projection.device.multiprocessors)
    waves = -(-blocks // slots)
    return (10 * waves * slots // blocks, plan.parts)


def run_sums(plan: SumsPlan, x: Tensor, weight: Tensor, parts: Tensor) -> None:
    *before, step = plan.launches
    streams, width = streams_of(x)
    outputs, size = weight.shape[0], streams * width
    read = weight
    for split in before:
        padded, pitch = split.arguments
        read = x.new_empty(_PIECES * padded, pitch)
        launch(split, weight, weight.stride(0), read, size, outputs, padded, pitch)
    given = (x, *stream_strides(x), read, read.stride(0))
    launch(step, parts, *given, x.shape[0], width, size, outputs, *step.arguments)


# --- grad_weight ------------------------------------------------------------------------------------------------------


def grad_weight_plans(projection: Projection) -> tuple[GradWeightPlan, ...]:
    """Every plan, best first: teams take chunks of rows side by side where there are several chunks."""
    groups = -(-projection.outputs // _GROUP)
    one = _Shape(MT=1, NT=groups, WARPS=4, TEAMS=1, KS=64, STAGES=3)
    few = _Shape(MT=1, NT=groups, WARPS=4, TEAMS=2, KS=32, STAGES=3)
    many = _Shape(MT=4 if groups <= 3 else 2, NT=groups, WARPS=2, TEAMS=4, KS=32, STAGES=3)
    shapes = {"one": one, "few": few, "many": many}
    best = next((name for name, most in (("one", CHUNK), ("few", 2 * CHUNK)) if projection.rows <= most), "many")
    order = [best, *(name for name in shapes if name != best)]
    return tuple(GradWeightPlan(True, (_grad_weight_launch(projection, shapes[name]),)) for name in order)


def _grad_weight_launch(projection: Projection, shape: _Shape) -> Launch:
    kernel = shape.kernel("fast_grad_weight", 8 if projection.x_aligned else 1)
    grid = (-(-projection.size // shape.tile), -(-projection.outputs // shape.outputs))
    levels = 1 + (shape.TEAMS if shape.TEAMS > 1 else 0)
    shared = shape.stages_bytes(0) + shape.TEAMS * shape.STAGES * shape.KS * 4 * (shape.outputs + 4)
    return Launch(kernel, grid, shape.threads, shared + levels * shape.level_bytes(0))


def run_grad_weight(plan: GradWeightPlan, grad_proj: Tensor, x: Tensor, start: Tensor | None, out: Tensor) -> None:
    (step,) = plan.launches
    streams, width = streams_of(x)
    begin = (0, 0) if start is None else (start, start.stride(0))
    given = (grad_proj, grad_proj.stride(0), x, *stream_strides(x), *begin)
    launch(step, out, *given, x.shape[0], width, streams * width, out.shape[0])
