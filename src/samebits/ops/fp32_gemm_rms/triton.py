"""``fp32_gemm_rms`` in Triton, ascending contracts, with the bits of ``reference.py``.

A plan moves work between programs, never an addition. The sum of squares is one more chain of a token: in the place of
output N, which is why N stops at 31, x meets itself instead of a row of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from samebits.dispatch import Call, Layout
from samebits.runtime.device import H200
from samebits.runtime.triton_launch import Tile, build, kernel, launch, left_fold, load, pointer, product, store

if TYPE_CHECKING:
    from samebits.audit.build import Build

# --- device code ------------------------------------------------------------------------------------------------------


@kernel
def _forward(  # type: ignore[no-untyped-def]
    x,
    weight,
    proj,
    r,
    q,
    x_row: tl.int64,
    weight_row: tl.int64,
    T: tl.int64,
    K: tl.int32,
    N: tl.int32,
    size: tl.float32,
    root: tl.float32,
    eps: tl.float32,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    DSV4: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: all chains of ROWS tokens, one lane each, over ascending k. ``size`` is K and ``root`` its square root."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, OUTPUTS)
    acc = tl.zeros((ROWS * OUTPUTS,), tl.float32)
    for start in tl.range(0, K, WIDTH, num_stages=STAGES):
        k = start + tl.arange(0, WIDTH)
        mine = load((x + row * x_row)[:, None], (row < T)[:, None], k[None, :], K, ALIGNED).to(tl.float32)
        rows = load((weight + n.to(tl.int64) * weight_row)[:, None], (n < N)[:, None], k[None, :], K, ALIGNED)
        other = tl.where((n == N)[None, :, None], mine[:, None, :], rows[None, :, :])
        terms = product(tl.broadcast_to(mine[:, None, :], (ROWS, OUTPUTS, WIDTH)), other)
        acc = left_fold(acc, tl.reshape(terms, (ROWS * OUTPUTS, WIDTH)), ROWS * OUTPUTS, WIDTH)
    sums = tl.reshape(acc, (ROWS, OUTPUTS))
    here = (row < T)[:, None]
    tl.store((proj + row * N)[:, None] + n[None, :], sums, here & (n < N)[None, :])
    squares = here & (n == N)[None, :]
    if DSV4:
        mean = tl.div_rn(sums, size)
        tl.store((q + row)[:, None] + n[None, :] * 0, mean, squares)
        tl.store((r + row)[:, None] + n[None, :] * 0, _approximate_rsqrt(mean + eps), squares)
    else:
        rms = tl.div_rn(_sqrt(sums), root)
        tl.store((q + row)[:, None] + n[None, :] * 0, rms, squares)
        tl.store((r + row)[:, None] + n[None, :] * 0, tl.div_rn(1.0, rms + eps), squares)


@triton.jit
def _sqrt(x):  # type: ignore[no-untyped-def]
    """The IEEE square root. ``tl.sqrt_rn`` flushes subnormals."""
    return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _approximate_rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@kernel
def _grad_x(  # type: ignore[no-untyped-def]
    grad_proj,
    grad_r,
    x,
    weight,
    r,
    q,
    grad_x,
    grad_row: tl.int64,
    grad_r_row: tl.int64,
    x_row: tl.int64,
    weight_row: tl.int64,
    r_row: tl.int64,
    q_row: tl.int64,
    T: tl.int64,
    K: tl.int32,
    N: tl.int32,
    size: tl.float32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DSV4: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS tokens by WIDTH columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = row < T
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for n in tl.range(0, N):
        upstream = tl.load(grad_proj + row * grad_row + n, here, 0.0)
        column = tl.load(weight + n * weight_row + k, k < K, 0.0)
        wide = tl.broadcast_to(upstream[:, None], (ROWS, WIDTH))
        acc = acc + product(wide, tl.broadcast_to(column[None, :], (ROWS, WIDTH)))
    rms = tl.load(q + row * q_row, here, 1.0)
    reciprocal = tl.load(r + row * r_row, here, 0.0)
    square = reciprocal * reciprocal
    if DSV4:
        factor = -(square * reciprocal)
        divisor = tl.zeros((ROWS,), tl.float32) + size
    else:
        factor = -square
        divisor = size * rms
    mine = load((x + row * x_row)[:, None], here[:, None], k[None, :], K, ALIGNED).to(tl.float32)
    quotient = tl.div_rn(factor[:, None] * mine, tl.broadcast_to(divisor[:, None], (ROWS, WIDTH)))
    upstream = tl.load(grad_r + row * grad_r_row, here, 0.0)
    leg = product(tl.broadcast_to(upstream[:, None], (ROWS, WIDTH)), quotient)
    leg = tl.where((rms == 0.0)[:, None], 0.0, leg)
    store((grad_x + row * K)[:, None], here[:, None], k[None, :], K, acc + leg, ALIGNED)


@kernel
def _grad_weight(  # type: ignore[no-untyped-def]
    grad_proj,
    x,
    start,
    grad_weight,
    grad_row: tl.int64,
    x_row: tl.int64,
    start_row: tl.int64,
    T: tl.int64,
    K: tl.int32,
    N: tl.int32,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: the chains of WIDTH columns and all outputs, one lane each, over ascending rows, ROWS at a time."""
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    n = tl.arange(0, OUTPUTS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    acc = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    if start is not None:
        acc = acc + tl.load(start + n.to(tl.int64)[:, None] * start_row + k[None, :], inside, 0.0)
    acc = tl.reshape(acc, (OUTPUTS * WIDTH,))
    for first in tl.range(0, T, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        here = row < T
        upstream = tl.load((grad_proj + row * grad_row)[:, None] + n[None, :], here[:, None] & (n < N)[None, :], 0.0)
        mine = load((x + row * x_row)[:, None], here[:, None], k[None, :], K, ALIGNED).to(tl.float32)
        shape: tl.constexpr = (OUTPUTS, WIDTH, ROWS)
        terms = product(
            tl.broadcast_to(tl.trans(upstream)[:, None, :], shape), tl.broadcast_to(tl.trans(mine)[None, :, :], shape)
        )
        acc = left_fold(acc, tl.reshape(terms, (OUTPUTS * WIDTH, ROWS)), OUTPUTS * WIDTH, ROWS)
    out = (grad_weight + n.to(tl.int64) * K)[:, None] + k[None, :]
    tl.store(out, tl.reshape(acc, (OUTPUTS, WIDTH)), inside)


# --- host code --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How each kernel of a call cuts its work. A call uses those that it needs."""

    sums: Tile
    """Tokens per program of the forward, by columns at a time."""
    columns: Tile
    """grad_x: tokens by columns of a program."""
    chains: Tile
    """grad_weight: rows at a time, by columns of a program."""


def plans(call: Call) -> tuple[Plan, ...]:
    few = call.size("N") < 8
    wide = Plan(Tile(8 if few else 1, 32, 1, stages=3), Tile(2, 1024, 4), Tile(8, 32 if few else 8, 1, stages=3))
    tall = Plan(Tile(16 if few else 4, 16, 4, stages=2), Tile(8, 512, 4), Tile(8, 64 if few else 16, 4, stages=2))
    return (tall, wide) if call.rows >= 4 * call.device.multiprocessors else (wide, tall)


@dataclass(frozen=True)
class _Step:
    """One launch: everything that decides what is compiled, except the dtypes."""

    function: Any
    tile: Tile
    constexprs: dict[str, int | bool]


def _steps(call: Call, plan: Plan) -> dict[str, _Step]:
    """The launches of a call in order, by what they compute."""

    def step(function: Any, tile: Tile, *read: str, **constexprs: int) -> _Step:
        aligned = call.size("K") % 8 == 0 and all(call.layout(name).aligned for name in read)
        return _Step(function, tile, {"ROWS": tile.rows, "WIDTH": tile.width, **constexprs, "ALIGNED": aligned})

    outputs = max(2, triton.next_power_of_2(call.size("N") + int(not call.backward)))
    dsv4 = int(call.contract.endswith("-dsv4"))
    if not call.backward:
        tile = plan.sums
        return {"proj": step(_forward, tile, "x", "weight", OUTPUTS=outputs, STAGES=tile.stages, DSV4=dsv4)}
    steps: dict[str, _Step] = {}
    if "grad_x" in call.wanted:
        steps["grad_x"] = step(_grad_x, plan.columns, "x", DSV4=dsv4)
    if "grad_weight" in call.wanted:
        tile = plan.chains
        steps["grad_weight"] = step(_grad_weight, tile, "x", OUTPUTS=outputs, STAGES=tile.stages)
    return steps


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    T, K, N = call.rows, call.size("K"), call.size("N")
    start = inputs.get("start_weight")
    tensors: dict[str, Tensor | None] = {**inputs, **results, "start": start}
    sizes = {"T": T, "K": K, "N": N, "size": float(K), "root": math.sqrt(K), "eps": scalars["eps"]}
    names = {
        "x": "x_row",
        "weight": "weight_row",
        "grad_proj": "grad_row",
        "grad_r": "grad_r_row",
        "r": "r_row",
        "q": "q_row",
    }
    strides = {stride: inputs[name].stride(0) for name, stride in names.items() if name in inputs}
    strides["start_row"] = 0 if start is None else start.stride(0)
    for result, step in _steps(call, plan).items():
        tile = step.tile
        grid: tuple[int, ...] = (triton.cdiv(T, tile.rows),)
        if result == "grad_x":
            grid = (*grid, triton.cdiv(K, tile.width))
        elif result == "grad_weight":
            grid = (triton.cdiv(K, tile.width),)
        known = {**tensors, **sizes, **strides}
        arguments = [known[name] for name in step.function.arg_names if name not in step.constexprs]
        launch(step.function, grid, *arguments, num_warps=tile.num_warps, **step.constexprs)


def builds() -> tuple[Build, ...]:
    """What runs at the tuned sizes and at a generic one, for few rows and for many, for the audit."""
    from samebits.audit.build import Build

    found: dict[Any, set[str]] = {}
    for call in _audited_calls():
        kinds: dict[str, str | None] = {name: pointer(layout.dtype) for name, layout in call.layouts}
        kinds |= dict.fromkeys(("proj", "r", "q", "grad_weight"), "*fp32")
        kinds |= {"start": "*fp32" if call.has("start_weight") else None, "grad_x": pointer(call.grad_dtype)}
        for step in _steps(call, plans(call)[0]).values():
            made = build(step.function, kinds, step.tile.num_warps, **step.constexprs)
            found.setdefault(made, set()).add(call.contract)
    return tuple(Build(made, tuple(sorted(contracts))) for made, contracts in found.items())


def _audited_calls() -> Iterator[Call]:
    for contract in ("ascending", "ascending-dsv4"):
        for outputs, rows in ((24, 1), (24, 4096), (4, 4096)):
            for size in (16384, 4097) if outputs == 24 else (16384,):
                yield _audited_call(contract, rows, outputs, size, "float32", ("proj", "r", "q"), start=False)
                yield _audited_call(contract, rows, outputs, size, "bfloat16", ("grad_x", "grad_weight"), start=True)
        yield _audited_call(contract, 4096, 24, 16384, "float32", ("grad_x", "grad_weight"), start=False)


def _audited_call(
    contract: str, rows: int, outputs: int, size: int, grad_dtype: str, wanted: tuple[str, ...], start: bool
) -> Call:
    backward = "grad_x" in wanted
    dtypes = {"x": "bfloat16", "weight": "float32"}
    if backward:
        dtypes |= dict.fromkeys(("grad_proj", "grad_r", "r", "q"), "float32")
    if start:
        dtypes["start_weight"] = "float32"
    layouts = tuple((name, Layout(dtype, (), size % 8 == 0)) for name, dtype in dtypes.items())
    sizes = (("N", outputs), ("K", size))
    return Call("fp32_gemm_rms", backward, contract, rows, sizes, layouts, wanted, grad_dtype, H200)
