"""The raw sums of a controller projection on CUDA, for this operator and for the composites that finish them otherwise.

``parts`` is FP32 (P, T, N + 1), contiguous: ``parts[p, t, n]`` is a partial of proj for n < N and of the sum of squares
for n = N. P is 1 under the ascending contracts: complete left folds. Under the fast ones part p is the binary subtree of
segments p * 16 / P .. (p + 1) * 16 / P, and the reader adds the parts as a binary tree of neighbours, so no bit depends
on P (csrc/controller.cuh).

Floors of the ascending sums: K * 4 cycles for a chain (33 us at K = 16384), 2 * T * (N + 1) * K operations over 29.6 T/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samebits.dispatch import Call, DeviceInfo
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel

_OP = "fp32_gemm_rms"


@dataclass(frozen=True)
class Projection:
    """What may influence the plan of a kernel that reads the streams ``x`` and the controller weight."""

    contract: str
    rows: int
    outputs: int
    """N, at most 31."""
    streams: int
    """x is (T, streams, width), read in place with any row and stream stride; 1 where x is (T, K)."""
    width: int
    x_dtype: str
    x_aligned: bool
    """Every row of every stream starts on 16 bytes, and ``width`` is a multiple of 8."""
    weight_aligned: bool
    """The same of the weight (N, K), which may have any row stride; the streams lie side by side in a row of it."""
    device: DeviceInfo

    @property
    def size(self) -> int:
        """K, the length of a chain."""
        return self.streams * self.width

    @property
    def fast(self) -> bool:
        return self.contract.startswith("fast")


def projection(call: Call, x: str = "x", weight: str = "weight") -> Projection:
    """The projection inside a call whose input ``x`` is (T, K) or (T, H, D) and whose ``weight`` is (N, K)."""
    layout, sizes = call.layout(x), dict(call.sizes)
    streams = sizes["H"] if len(layout.strides) == 3 else 1
    width = sizes["D"] if len(layout.strides) == 3 else sizes["K"]
    return Projection(
        contract=call.contract,
        rows=call.rows,
        outputs=sizes["N"],
        streams=streams,
        width=width,
        x_dtype=layout.dtype,
        x_aligned=layout.aligned and width % 8 == 0,
        weight_aligned=call.has(weight) and call.layout(weight).aligned and width % 8 == 0,
        device=call.device,
    )


@dataclass(frozen=True)
class SumsPlan:
    """How the raw sums are computed: ``parts`` is P, ``launches`` run in order. Every plan leads to the same bits."""

    fast: bool
    parts: int
    launches: tuple[Launch, ...]


def sums_plans(projection: Projection) -> tuple[SumsPlan, ...]:
    """Every plan of a projection, best first. Pure."""
    if projection.fast:
        from samebits.ops.fp32_gemm_rms import cuda_fast

        return cuda_fast.sums_plans(projection)
    together = [_launch(projection, shape) for shape in _ranked(projection)]
    alone = [_alone(projection, chains) for chains in _ALONE]
    best = next((i for i, (_, most) in enumerate(_ALONE.items()) if projection.rows <= most), None)
    launches = [*together, *alone] if best is None else [alone[best], *together, *alone[:best], *alone[best + 1 :]]
    return tuple(SumsPlan(False, 1, (step,)) for step in launches)


def run_sums(plan: SumsPlan, x: Tensor, weight: Tensor, parts: Tensor) -> None:
    """Fill ``parts`` (plan.parts, T, N + 1) from x (T, K) or (T, H, D), dense in its last axis, and weight (N, K)."""
    if plan.fast:
        from samebits.ops.fp32_gemm_rms import cuda_fast

        cuda_fast.run_sums(plan, x, weight, parts)
        return
    (step,) = plan.launches
    outputs = weight.shape[0]
    launch(step, x, *stream_strides(x), weight, weight.stride(0), parts, x.shape[0], *streams_of(x), outputs)


def streams_of(x: Tensor) -> tuple[int, int]:
    """(streams, width) of x (T, K) or (T, H, D)."""
    return (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])


def stream_strides(x: Tensor) -> tuple[int, int]:
    """(row stride, stream stride) of x (T, K) or (T, H, D)."""
    return x.stride(0), 0 if x.dim() == 2 else x.stride(1)


# --- ascending --------------------------------------------------------------------------------------------------------

_WARP = 32
_CHAIN, _SQUARES = 4.4, 3.5
"""Cycles per column of the length of a row: of a chain that waits for its own additions, tile changes included, and of
the instructions of a warp that folds squares."""
_STATIC_SHARED = 1024


@dataclass(frozen=True)
class _Shape:
    """How a block of sums_ascending.cu is cut; the names are those of its macros."""

    R: int
    S: int
    LT: int
    WT: int
    WN: int
    KB: int
    KT: int
    STAGES: int
    PRODUCERS: int

    @property
    def tokens(self) -> int:
        return self.WT * self.LT * self.R

    @property
    def outputs(self) -> int:
        return self.WN * _WARP // self.LT * self.S

    @property
    def square_warps(self) -> int:
        return -(-self.tokens // _WARP)

    @property
    def threads(self) -> int:
        return _WARP * (self.WT * self.WN + self.square_warps + self.PRODUCERS)

    def shared(self, x_bytes: int) -> int:
        tokens = self.tokens * (self.KT * x_bytes + 16)
        return self.STAGES * (tokens + self.outputs * (self.KT * 4 + 16))

    def blocks(self, projection: Projection) -> tuple[int, int]:
        return -(-projection.rows // self.tokens), -(-projection.outputs // self.outputs)

    def cost(self, projection: Projection) -> float:
        """Estimated cycles per column: the chain, or what the busiest part of a multiprocessor has to issue."""
        across, down = self.blocks(projection)
        per_sm = -(-across * down // max(1, projection.device.multiprocessors))
        dot = 2 * self.R * self.S + 1.25 * self.R + self.S / 4 + 0.4
        dots = self.WT * self.WN
        alone = -(-dots // 4) * dot + (_SQUARES * -(-self.square_warps // 4) if dots >= 4 else 0.0)
        shared = (dots * dot + self.square_warps * _SQUARES) / 4
        several = self.R * self.S <= 12  # a block with more chains per thread fills the registers of a multiprocessor
        return max(_CHAIN, alone if per_sm == 1 else per_sm * (shared if several else alone))


def _shapes(projection: Projection) -> list[_Shape]:
    """From one chain per lane, where only the latency of an addition counts, to 24 that share what they read.

    What no vector load fits gets a single shape.
    """
    n = projection.outputs
    ahead = 8 if projection.x_dtype == "bfloat16" else 4
    if n <= 4:
        return [_Shape(R=2, S=1, LT=8, WT=2, WN=1, KB=ahead, KT=128, STAGES=6, PRODUCERS=2)]
    wide = max(2, -(-n // 12))  # ptxas keeps an array of the narrowest one in local memory
    many = _Shape(R=2, S=3, LT=8, WT=2, WN=wide, KB=ahead, KT=128, STAGES=4, PRODUCERS=3)
    if _vec(projection) == 1:
        return [many]
    return [
        _Shape(R=1, S=1, LT=4, WT=1, WN=1, KB=8, KT=256, STAGES=6, PRODUCERS=2),
        _Shape(R=1, S=1, LT=4, WT=1, WN=-(-n // 8), KB=8, KT=256, STAGES=4, PRODUCERS=4),
        _Shape(R=2, S=1, LT=4, WT=1, WN=-(-n // 8), KB=8, KT=128, STAGES=6, PRODUCERS=4),
        many,
        _Shape(R=4, S=6, LT=8, WT=4, WN=-(-n // 24), KB=4, KT=64, STAGES=4, PRODUCERS=4),
    ]


def _ranked(projection: Projection) -> list[_Shape]:
    """The shapes that fit the device, the one with the least estimated time first."""
    x_bytes = 2 if projection.x_dtype == "bfloat16" else 4
    limit = projection.device.shared_bytes - _STATIC_SHARED
    fitting = [shape for shape in _shapes(projection) if shape.shared(x_bytes) <= limit]
    return sorted(fitting, key=lambda shape: shape.cost(projection))


_ALONE = {5: 40, 13: 160}
"""Chains of a block of sums_few.cu, and the most tokens for which that is the fastest."""
_PRODUCERS = 128


def _alone(projection: Projection, chains: int) -> Launch:
    """One token per block: its folding lanes do nothing but add."""
    defines = {
        "CHAINS": chains,
        "PRODUCERS": _PRODUCERS,
        "VEC": _vec(projection),
        "X_BF16": int(projection.x_dtype == "bfloat16"),
    }
    kernel = CudaKernel(_OP, "sums_few", tuple(sorted(defines.items())))
    grid = (projection.rows, -(-(projection.outputs + 1) // chains))
    return Launch(kernel, grid, 32 + _PRODUCERS, 2 * chains * (4 * _PRODUCERS + 4) * 4)


def _launch(projection: Projection, shape: _Shape) -> Launch:
    bf16 = projection.x_dtype == "bfloat16"
    defines = {**vars(shape), "VEC": _vec(projection), "X_BF16": int(bf16)}
    kernel = CudaKernel(_OP, "sums_ascending", tuple(sorted(defines.items())))
    return Launch(kernel, shape.blocks(projection), shape.threads, shape.shared(2 if bf16 else 4))


def _vec(projection: Projection) -> int:
    """FP32 rows, which no model has, go element by element."""
    bf16 = projection.x_dtype == "bfloat16"
    return 8 if bf16 and projection.x_aligned and projection.weight_aligned else 1
