"""``mhc_post`` in Triton, with the bits of ``reference.py``: a plan moves work between programs, never an addition.

A backward takes two kernels: one for the gradients that are mixes over streams, the same for both contracts, and one for the
sums over D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from samebits.dispatch import Call, Layout
from samebits.runtime.device import H200
from samebits.runtime.triton_launch import (
    Tile,
    aligned,
    build,
    halving_tree,
    kernel,
    launch,
    left_fold,
    load,
    pointer,
    product,
    store,
)

if TYPE_CHECKING:
    from samebits.audit.build import Build

# --- mixes over streams -----------------------------------------------------------------------------------------------


@triton.jit
def _tree4(weights, step, here, v0, v1, v2, v3):  # type: ignore[no-untyped-def]
    """(w0*v0 + w1*v1) + (w2*v2 + w3*v3) for (ROWS, WIDTH) tiles; the four weights of a row lie ``step`` apart."""
    w0 = tl.load(weights, here, 0.0)[:, None]
    w1 = tl.load(weights + step, here, 0.0)[:, None]
    w2 = tl.load(weights + 2 * step, here, 0.0)[:, None]
    w3 = tl.load(weights + 3 * step, here, 0.0)[:, None]
    return (product(w0, v0) + product(w1, v1)) + (product(w2, v2) + product(w3, v3))


@kernel
def _forward(  # type: ignore[no-untyped-def]
    residual,
    sublayer,
    comb,
    post,
    streams,
    residual_row: tl.int64,
    residual_stream: tl.int64,
    sublayer_row: tl.int64,
    comb_row: tl.int64,
    comb_stream: tl.int64,
    post_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows by WIDTH columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    here = row < T
    old = (residual + row * residual_row)[:, None]
    r0 = load(old, here[:, None], d, D, ALIGNED).to(tl.float32)
    r1 = load(old + residual_stream, here[:, None], d, D, ALIGNED).to(tl.float32)
    r2 = load(old + 2 * residual_stream, here[:, None], d, D, ALIGNED).to(tl.float32)
    r3 = load(old + 3 * residual_stream, here[:, None], d, D, ALIGNED).to(tl.float32)
    y = load((sublayer + row * sublayer_row)[:, None], here[:, None], d, D, ALIGNED).to(tl.float32)
    for j in tl.static_range(4):
        mixed = _tree4(comb + row * comb_row + j, comb_stream, here, r0, r1, r2, r3)
        gain = tl.load(post + row * post_row + j, here, 0.0)[:, None]
        store((streams + (row * 4 + j) * D)[:, None], here[:, None], d, D, mixed + product(gain, y), ALIGNED)


@kernel
def _backward_streams(  # type: ignore[no-untyped-def]
    grad_streams,
    comb,
    post,
    grad_residual,
    grad_sublayer,
    grad_row: tl.int64,
    grad_stream: tl.int64,
    comb_row: tl.int64,
    comb_stream: tl.int64,
    post_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows by WIDTH columns. None: gradient not wanted."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    here = row < T
    upstream = (grad_streams + row * grad_row)[:, None]
    g0 = load(upstream, here[:, None], d, D, ALIGNED).to(tl.float32)
    g1 = load(upstream + grad_stream, here[:, None], d, D, ALIGNED).to(tl.float32)
    g2 = load(upstream + 2 * grad_stream, here[:, None], d, D, ALIGNED).to(tl.float32)
    g3 = load(upstream + 3 * grad_stream, here[:, None], d, D, ALIGNED).to(tl.float32)
    if grad_residual is not None:
        for i in tl.static_range(4):
            mixed = _tree4(comb + row * comb_row + i * comb_stream, 1, here, g0, g1, g2, g3)
            store((grad_residual + (row * 4 + i) * D)[:, None], here[:, None], d, D, mixed, ALIGNED)
    if grad_sublayer is not None:
        mixed = _tree4(post + row * post_row, 1, here, g0, g1, g2, g3)
        store((grad_sublayer + row * D)[:, None], here[:, None], d, D, mixed, ALIGNED)


# --- sums over D ------------------------------------------------------------------------------------------------------


@triton.jit
def _streams_at(rows, stream, row, T, d, D, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, 4, WIDTH): the four streams of the rows that start at ``rows``, in FP32."""
    i = tl.arange(0, 4)[None, :]
    here = ((row < T)[:, None] & (i < 4))[:, :, None]
    return load((rows[:, None] + i * stream)[:, :, None], here, d[None, None, :], D, ALIGNED).to(tl.float32)


@kernel
def _sums_ascending(  # type: ignore[no-untyped-def]
    grad_streams,
    residual,
    sublayer,
    grad_comb,
    grad_post,
    grad_row: tl.int64,
    grad_stream: tl.int64,
    residual_row: tl.int64,
    residual_stream: tl.int64,
    sublayer_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: the 20 chains of each of ROWS rows over ascending d, a lane per chain. None: not wanted."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    comb = tl.zeros((ROWS * 16,), tl.float32)
    post = tl.zeros((ROWS * 4,), tl.float32)
    for start in tl.range(0, D, WIDTH, num_stages=STAGES):
        d = start + tl.arange(0, WIDTH)
        g = _streams_at(grad_streams + row * grad_row, grad_stream, row, T, d, D, ALIGNED)
        if grad_comb is not None:
            r = _streams_at(residual + row * residual_row, residual_stream, row, T, d, D, ALIGNED)
            terms = product(r[:, :, None, :], g[:, None, :, :])
            comb = left_fold(comb, tl.reshape(terms, (ROWS * 16, WIDTH)), ROWS * 16, WIDTH)
        if grad_post is not None:
            there = (row < T)[:, None, None]
            y = load((sublayer + row * sublayer_row)[:, None, None], there, d[None, None, :], D, ALIGNED)
            post = left_fold(post, tl.reshape(product(y.to(tl.float32), g), (ROWS * 4, WIDTH)), ROWS * 4, WIDTH)
    if grad_comb is not None:
        chain = tl.program_id(0).to(tl.int64) * (ROWS * 16) + tl.arange(0, ROWS * 16)
        tl.store(grad_comb + chain, comb, chain < T * 16)
    if grad_post is not None:
        chain = tl.program_id(0).to(tl.int64) * (ROWS * 4) + tl.arange(0, ROWS * 4)
        tl.store(grad_post + chain, post, chain < T * 4)


@triton.jit
def _tree128(partials, CHAINS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halving tree inside each group of 32 partials, then over the groups. Absent groups are +0 and change nothing."""
    GROUP: tl.constexpr = min(LANES, 32)
    GROUPS: tl.constexpr = LANES // GROUP
    groups = halving_tree(tl.reshape(partials, (CHAINS * GROUPS, GROUP)), CHAINS * GROUPS, GROUP)
    return halving_tree(tl.reshape(groups, (CHAINS, GROUPS)), CHAINS, GROUPS)


@kernel
def _sums_fast(  # type: ignore[no-untyped-def]
    grad_streams,
    residual,
    sublayer,
    grad_comb,
    grad_post,
    grad_row: tl.int64,
    grad_stream: tl.int64,
    residual_row: tl.int64,
    residual_stream: tl.int64,
    sublayer_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows. Partial u of a chain takes vectors u, u + LANES, ... of four columns; then the tree.

    LANES = 128 wherever D > 256. Below, partials without a column are left out: they would be +0. None: not wanted.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    comb = tl.zeros((ROWS * 16 * LANES,), tl.float32)
    post = tl.zeros((ROWS * 4 * LANES,), tl.float32)
    for start in tl.range(0, D, LANES * 4, num_stages=STAGES):
        d = start + tl.arange(0, LANES * 4)
        g = _streams_at(grad_streams + row * grad_row, grad_stream, row, T, d, D, ALIGNED)
        if grad_comb is not None:
            r = _streams_at(residual + row * residual_row, residual_stream, row, T, d, D, ALIGNED)
            terms = tl.reshape(product(r[:, :, None, :], g[:, None, :, :]), (ROWS * 16 * LANES, 4))
            comb = left_fold(comb, terms, ROWS * 16 * LANES, 4)
        if grad_post is not None:
            there = (row < T)[:, None, None]
            y = load((sublayer + row * sublayer_row)[:, None, None], there, d[None, None, :], D, ALIGNED)
            terms = tl.reshape(product(y.to(tl.float32), g), (ROWS * 4 * LANES, 4))
            post = left_fold(post, terms, ROWS * 4 * LANES, 4)
    if grad_comb is not None:
        chain = tl.program_id(0).to(tl.int64) * (ROWS * 16) + tl.arange(0, ROWS * 16)
        tl.store(grad_comb + chain, _tree128(comb, ROWS * 16, LANES), chain < T * 16)
    if grad_post is not None:
        chain = tl.program_id(0).to(tl.int64) * (ROWS * 4) + tl.arange(0, ROWS * 4)
        tl.store(grad_post + chain, _tree128(post, ROWS * 4, LANES), chain < T * 4)


# --- host code --------------------------------------------------------------------------------------------------------

_STREAMS, _SUMS = ("grad_residual", "grad_sublayer"), ("grad_comb", "grad_post")
_STRIDES = {
    "grad_row": ("grad_streams", 0),
    "grad_stream": ("grad_streams", 1),
    "residual_row": ("residual", 0),
    "residual_stream": ("residual", 1),
    "sublayer_row": ("sublayer", 0),
    "comb_row": ("comb", 0),
    "comb_stream": ("comb", 1),
    "post_row": ("post", 0),
}


@dataclass(frozen=True)
class Plan:
    mix: Tile
    """Rows by columns of a program that mixes streams."""
    sums: Tile
    """Rows by columns at a time of a program that sums over D."""


def plans(call: Call) -> tuple[Plan, ...]:
    width = min(1024, max(8, triton.next_power_of_2(call.size("D"))))
    rows = 1024 // width
    mixes = Tile(rows, width, 4), Tile(2 * rows, width, 8), Tile(rows, max(8, width // 2), 2)
    if call.contract == "ascending":
        sums = Tile(2, 64 if aligned(call, "D") else 32, 1, stages=3), Tile(4, 32, 2, stages=2), Tile(1, 64, 1)
    else:
        lanes = min(128, triton.next_power_of_2(triton.cdiv(call.size("D"), 4)))
        sums = Tile(1, 4 * lanes, 4, stages=2), Tile(1, 4 * lanes, 8), Tile(2, 4 * lanes, 8)
    return tuple(Plan(mix, fold) for mix, fold in zip(mixes, sums, strict=True))


@dataclass(frozen=True)
class _Step:
    """One launch: everything that decides what is compiled, except the dtypes."""

    function: Any
    tile: Tile
    constexprs: dict[str, int | bool]
    results: tuple[str, ...]
    """What it computes."""


def _steps(call: Call, plan: Plan) -> tuple[_Step, ...]:
    def step(function: Any, tile: Tile, results: tuple[str, ...], **constexprs: int) -> _Step:
        return _Step(function, tile, {"ROWS": tile.rows, **constexprs, "ALIGNED": aligned(call, "D")}, results)

    if not call.backward:
        return (step(_forward, plan.mix, ("streams",), WIDTH=plan.mix.width),)
    mixes = tuple(name for name in _STREAMS if name in call.wanted)
    sums = tuple(name for name in _SUMS if name in call.wanted)
    steps = []
    if mixes:
        steps.append(step(_backward_streams, plan.mix, mixes, WIDTH=plan.mix.width))
    if sums and call.contract == "ascending":
        steps.append(step(_sums_ascending, plan.sums, sums, WIDTH=plan.sums.width, STAGES=plan.sums.stages))
    elif sums:
        steps.append(step(_sums_fast, plan.sums, sums, LANES=plan.sums.width // 4, STAGES=plan.sums.stages))
    return tuple(steps)


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    sizes = {"T": call.rows, "D": call.size("D")}
    strides = {key: inputs[name].stride(axis) for key, (name, axis) in _STRIDES.items() if name in inputs}
    absent = dict.fromkeys((*_STREAMS, *_SUMS))
    known = {**absent, **inputs, **results, **strides, **sizes}
    for step in _steps(call, plan):
        tile = step.tile
        rows = triton.cdiv(call.rows, tile.rows)
        grid = (rows, triton.cdiv(call.size("D"), tile.width)) if tile is plan.mix else (rows,)
        arguments = [known[name] for name in step.function.arg_names if name not in step.constexprs]
        launch(step.function, grid, *arguments, num_warps=tile.num_warps, **step.constexprs)


def builds() -> tuple[Build, ...]:
    """What runs at the tuned widths and at a generic one, for the audit."""
    from samebits.audit.build import Build

    found: dict[Any, set[str]] = {}
    for call in _audited_calls():
        kinds = {name: pointer(layout.dtype) for name, layout in call.layouts}
        for step in _steps(call, plans(call)[0]):
            outputs = {
                "streams": "*bf16",
                **dict.fromkeys(_SUMS, "*fp32"),
                **dict.fromkeys(_STREAMS, pointer(call.grad_dtype)),
            }
            pointers = kinds | {name: kind if name in step.results else None for name, kind in outputs.items()}
            made = build(step.function, pointers, step.tile.num_warps, **step.constexprs)
            found.setdefault(made, set()).add(call.contract)
    return tuple(Build(made, tuple(sorted(contracts))) for made, contracts in found.items())


def _audited_calls() -> Iterator[Call]:
    everything = (*_STREAMS, *_SUMS)
    for contract in ("ascending", "fast"):
        for width in (4096, 4097):
            yield _audited_call(contract, width, "bfloat16", "float32", ("streams",))
            yield _audited_call(contract, width, "bfloat16", "float32", everything)
            yield _audited_call(contract, width, "float32", "bfloat16", everything)
        for one in everything:
            yield _audited_call(contract, 4096, "bfloat16", "bfloat16", (one,))
        yield _audited_call(contract, 4096, "bfloat16", "float32", everything[1:])


def _audited_call(contract: str, width: int, upstream: str, grad_dtype: str, wanted: tuple[str, ...]) -> Call:
    backward = wanted != ("streams",)
    dtypes = {"grad_streams": upstream} if backward else {}
    dtypes |= {"residual": "bfloat16", "sublayer": "bfloat16", "comb": "float32", "post": "float32"}
    layouts = tuple((name, Layout(dtype, (), width % 8 == 0)) for name, dtype in dtypes.items())
    return Call("mhc_post", backward, contract, 4096, (("D", width),), layouts, wanted, grad_dtype, H200)
