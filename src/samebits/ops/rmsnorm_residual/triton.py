"""``rmsnorm_residual`` in Triton, with the bits of ``reference.py``: a plan moves work, never an addition.

The ascending contract takes two kernels a pass: one lane per row folds the sum, then all elements are rewritten in
parallel. The tree contract takes one: its second look at the row finds it in the cache.
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

# --- formulas ---------------------------------------------------------------------------------------------------------


@triton.jit
def _approximate_rsqrt(x):  # type: ignore[no-untyped-def]
    """The instruction that ``torch.rsqrt`` runs. ``tl.rsqrt`` would emit its flush-to-zero form."""
    return tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rstd(total, count, eps):  # type: ignore[no-untyped-def]
    return _approximate_rsqrt(tl.div_rn(total, count) + eps)


@triton.jit
def _norm_leg(upstream, x, rstd, total, count):  # type: ignore[no-untyped-def]
    """rstd*u - ((x*rstd^3) * total) / D, one rounding per operation."""
    cube = (rstd * rstd) * rstd
    return product(rstd, upstream) - tl.div_rn((x * cube) * total, count)


# --- ascending contract -----------------------------------------------------------------------------------------------


@kernel
def _rstd_ascending(  # type: ignore[no-untyped-def]
    x,
    rstd,
    x_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    count: tl.float32,
    eps: tl.float32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS chains, one lane each, over ascending d. ``count`` is D as a float, exact up to 2^24."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, D, WIDTH, num_stages=STAGES):
        d = (start + tl.arange(0, WIDTH))[None, :]
        wide = load((x + row * x_row)[:, None], (row < T)[:, None], d, D, ALIGNED).to(tl.float32)
        acc = left_fold(acc, product(wide, wide), ROWS, WIDTH)
    tl.store(rstd + row, _rstd(acc, count, eps), row < T)


@kernel
def _normalise(  # type: ignore[no-untyped-def]
    x,
    gamma,
    rstd,
    y,
    residual,
    x_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows by WIDTH columns of y = (x * rstd) * gamma and of the copy."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    here = (row < T)[:, None]
    r = tl.load(rstd + row, row < T, 0.0)[:, None]
    stored = load((x + row * x_row)[:, None], here, d, D, ALIGNED)
    gain = load(gamma, None, d, D, ALIGNED)
    store((residual + row * D)[:, None], here, d, D, stored, ALIGNED)
    store((y + row * D)[:, None], here, d, D, (stored.to(tl.float32) * r) * gain, ALIGNED)


@kernel
def _dot_ascending(  # type: ignore[no-untyped-def]
    grad_y,
    x,
    gamma,
    total,
    grad_row: tl.int64,
    x_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """total = sum over ascending d of (grad_y * gamma) * x, one lane per row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (row < T)[:, None]
    acc = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, D, WIDTH, num_stages=STAGES):
        d = (start + tl.arange(0, WIDTH))[None, :]
        upstream = load((grad_y + row * grad_row)[:, None], here, d, D, ALIGNED).to(tl.float32)
        upstream = upstream * load(gamma, None, d, D, ALIGNED)
        wide = load((x + row * x_row)[:, None], here, d, D, ALIGNED).to(tl.float32)
        acc = left_fold(acc, product(upstream, wide), ROWS, WIDTH)
    tl.store(total + row, acc, row < T)


@kernel
def _grad_x(  # type: ignore[no-untyped-def]
    grad_y,
    grad_residual,
    x,
    gamma,
    rstd,
    total,
    grad_x,
    grad_row: tl.int64,
    residual_row: tl.int64,
    x_row: tl.int64,
    rstd_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    count: tl.float32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows by WIDTH columns of grad_x, from the total that :func:`_dot_ascending` left."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    here = (row < T)[:, None]
    r = tl.load(rstd + row * rstd_row, row < T, 0.0)[:, None]
    summed = tl.load(total + row, row < T, 0.0)[:, None]
    upstream = load((grad_y + row * grad_row)[:, None], here, d, D, ALIGNED).to(tl.float32)
    upstream = upstream * load(gamma, None, d, D, ALIGNED)
    wide = load((x + row * x_row)[:, None], here, d, D, ALIGNED).to(tl.float32)
    gradient = _norm_leg(upstream, wide, r, summed, count)
    if grad_residual is None:
        gradient = gradient + 0.0  # the absent leg is a zero, and -0 + 0 is +0
    else:
        gradient = gradient + load((grad_residual + row * residual_row)[:, None], here, d, D, ALIGNED).to(tl.float32)
    store((grad_x + row * D)[:, None], here, d, D, gradient, ALIGNED)


# --- tree512 contract -------------------------------------------------------------------------------------------------
# A tile is (ROWS, LANES, 8): element e of vector v of a row. LANES = 512 wherever D >= 4096. Below, partials without an
# element are left out: they would be +0, and p + 0 = p for every p that a fold from +0 can reach.


@kernel
def _forward_tree512(  # type: ignore[no-untyped-def]
    x,
    gamma,
    y,
    residual,
    rstd,
    x_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    count: tl.float32,
    eps: tl.float32,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (row < T)[:, None, None]
    rows = (x + row * x_row)[:, None, None]
    element = tl.arange(0, LANES)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    acc = tl.zeros((ROWS * LANES,), tl.float32)
    for start in tl.range(0, D, LANES * 8):
        wide = load(rows, here, start + element, D, ALIGNED).to(tl.float32)
        acc = left_fold(acc, tl.reshape(product(wide, wide), (ROWS * LANES, 8)), ROWS * LANES, 8)
    r = _rstd(halving_tree(tl.reshape(acc, (ROWS, LANES)), ROWS, LANES), count, eps)
    tl.store(rstd + row, r, row < T)
    r = r[:, None, None]
    for start in tl.range(0, D, LANES * 8):
        d = start + element
        stored = load(rows, here, d, D, ALIGNED)
        gain = load(gamma, None, d, D, ALIGNED)
        store((residual + row * D)[:, None, None], here, d, D, stored, ALIGNED)
        store((y + row * D)[:, None, None], here, d, D, (stored.to(tl.float32) * r) * gain, ALIGNED)


@kernel
def _grad_x_tree512(  # type: ignore[no-untyped-def]
    grad_y,
    grad_residual,
    x,
    gamma,
    rstd,
    grad_x,
    grad_row: tl.int64,
    residual_row: tl.int64,
    x_row: tl.int64,
    rstd_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    count: tl.float32,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (row < T)[:, None, None]
    upstreams = (grad_y + row * grad_row)[:, None, None]
    rows = (x + row * x_row)[:, None, None]
    element = tl.arange(0, LANES)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    acc = tl.zeros((ROWS * LANES,), tl.float32)
    for start in tl.range(0, D, LANES * 8):
        d = start + element
        upstream = load(upstreams, here, d, D, ALIGNED).to(tl.float32) * load(gamma, None, d, D, ALIGNED)
        terms = product(upstream, load(rows, here, d, D, ALIGNED).to(tl.float32))
        acc = left_fold(acc, tl.reshape(terms, (ROWS * LANES, 8)), ROWS * LANES, 8)
    summed = halving_tree(tl.reshape(acc, (ROWS, LANES)), ROWS, LANES)[:, None, None]
    r = tl.load(rstd + row * rstd_row, row < T, 0.0)[:, None, None]
    for start in tl.range(0, D, LANES * 8):
        d = start + element
        upstream = load(upstreams, here, d, D, ALIGNED).to(tl.float32) * load(gamma, None, d, D, ALIGNED)
        gradient = _norm_leg(upstream, load(rows, here, d, D, ALIGNED).to(tl.float32), r, summed, count)
        if grad_residual is None:
            gradient = gradient + 0.0  # the absent leg is a zero, and -0 + 0 is +0
        else:
            leg = load((grad_residual + row * residual_row)[:, None, None], here, d, D, ALIGNED)
            gradient = gradient + leg.to(tl.float32)
        store((grad_x + row * D)[:, None, None], here, d, D, gradient, ALIGNED)


# --- both contracts ---------------------------------------------------------------------------------------------------


@kernel
def _grad_gamma(  # type: ignore[no-untyped-def]
    grad_y,
    x,
    rstd,
    start_gamma,
    grad_gamma,
    grad_row: tl.int64,
    x_row: tl.int64,
    rstd_row: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: WIDTH columns, one chain each, over all rows in ascending order, ROWS rows at a time."""
    d = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    acc = tl.zeros((WIDTH,), tl.float32)
    if start_gamma is not None:
        acc = acc + tl.load(start_gamma + d, d < D, 0.0)
    for first in tl.range(0, T, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        here = (row < T)[:, None]
        upstream = load((grad_y + row * grad_row)[:, None], here, d[None, :], D, ALIGNED).to(tl.float32)
        wide = load((x + row * x_row)[:, None], here, d[None, :], D, ALIGNED).to(tl.float32)
        r = tl.load(rstd + row * rstd_row, row < T, 0.0)[:, None]
        acc = left_fold(acc, tl.trans(product(upstream * wide, r)), WIDTH, ROWS)
    tl.store(grad_gamma + d, acc, d < D)


# --- host code --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How each kind of kernel of a call cuts its work. A call uses those that its contract and direction need."""

    sums: Tile
    """Ascending: rows per program of a chain kernel."""
    rewrite: Tile
    """Ascending: the elementwise kernels."""
    tree: Tile
    """tree512: whole rows; the width is 8 * LANES."""
    columns: Tile
    """grad_gamma: rows at a time by columns per program."""


def plans(call: Call) -> tuple[Plan, ...]:
    block = min(1024, max(8, triton.next_power_of_2(call.size("D"))))
    vectors = min(512, triton.next_power_of_2(triton.cdiv(call.size("D"), 8)))
    rows = 512 // vectors
    few = call.rows <= 4 * call.device.multiprocessors
    wide = Plan(
        sums=Tile(32, 64 if aligned(call, "D") else 32, 1, stages=3),
        rewrite=Tile(1024 // block, block, 4),
        tree=Tile(rows, 8 * vectors, 16 if few else 4),
        columns=Tile(64, 16, 4, stages=3),
    )
    narrow = Plan(
        sums=Tile(8, 128, 1, stages=2),
        rewrite=Tile(2048 // block, block, 4),
        tree=Tile(rows, 8 * vectors, 4 if few else 8),
        columns=Tile(32, 32, 1, stages=3),
    )
    plain = Plan(
        sums=Tile(64, 16, 2),
        rewrite=Tile(512 // min(block, 512), min(block, 512), 2),
        tree=Tile(1, 8 * vectors, 2),
        columns=Tile(16, 64, 2),
    )
    return wide, narrow, plain


@dataclass(frozen=True)
class _Step:
    """One launch: everything that decides what is compiled, except the dtypes."""

    function: Any
    tile: Tile
    constexprs: dict[str, int | bool]


def _steps(call: Call, plan: Plan) -> dict[str, _Step]:
    """The launches of a call in order, by what they compute."""

    def step(function: Any, tile: Tile, **constexprs: int) -> _Step:
        return _Step(function, tile, {"ROWS": tile.rows, **constexprs, "ALIGNED": aligned(call, "D")})

    def chains(function: Any, tile: Tile) -> _Step:
        return step(function, tile, WIDTH=tile.width, STAGES=tile.stages)

    ascending = call.contract == "ascending"
    lanes = plan.tree.width // 8
    steps: dict[str, _Step] = {}
    if not call.backward and ascending:
        steps["rstd"] = chains(_rstd_ascending, plan.sums)
        steps["y"] = step(_normalise, plan.rewrite, WIDTH=plan.rewrite.width)
    elif not call.backward:
        steps["y"] = step(_forward_tree512, plan.tree, LANES=lanes)
    if "grad_x" in call.wanted and ascending:
        steps["total"] = chains(_dot_ascending, plan.sums)
        steps["grad_x"] = step(_grad_x, plan.rewrite, WIDTH=plan.rewrite.width)
    elif "grad_x" in call.wanted:
        steps["grad_x"] = step(_grad_x_tree512, plan.tree, LANES=lanes)
    if "grad_gamma" in call.wanted:
        steps["grad_gamma"] = chains(_grad_gamma, plan.columns)
    return steps


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    T, D = call.rows, call.size("D")
    steps = _steps(call, plan)
    tensors: dict[str, Tensor | None] = {"grad_residual": None, "start_gamma": None, **inputs, **results}
    if "total" in steps:
        tensors["total"] = inputs["rstd"].new_empty(T)
    sizes = {"T": T, "D": D, "count": float(D), "eps": scalars["eps"]}
    names = {"x": "x_row", "grad_y": "grad_row", "grad_residual": "residual_row", "rstd": "rstd_row"}
    strides = {stride: inputs[name].stride(0) if name in inputs else 0 for name, stride in names.items()}
    for result, step in steps.items():
        tile = step.tile
        if result == "grad_gamma":
            grid: tuple[int, ...] = (triton.cdiv(D, tile.width),)
        elif tile is plan.rewrite:
            grid = (triton.cdiv(T, tile.rows), triton.cdiv(D, tile.width))
        else:
            grid = (triton.cdiv(T, tile.rows),)
        known = {**tensors, **sizes, **strides}
        arguments = [known[name] for name in step.function.arg_names if name not in step.constexprs]
        launch(step.function, grid, *arguments, num_warps=tile.num_warps, **step.constexprs)


def builds() -> tuple[Build, ...]:
    """What runs at the tuned widths and at a generic one, for few rows and for many, for the audit."""
    from samebits.audit.build import Build

    found: dict[Any, set[str]] = {}
    for call in _audited_calls():
        kinds: dict[str, str | None] = {name: pointer(layout.dtype) for name, layout in call.layouts}
        kinds = {"grad_residual": None, "start_gamma": None, "total": "*fp32", "rstd": "*fp32", **kinds}
        kinds |= {"y": "*bf16", "residual": "*bf16", "grad_x": pointer(call.grad_dtype), "grad_gamma": "*fp32"}
        for step in _steps(call, plans(call)[0]).values():
            made = build(step.function, kinds, step.tile.num_warps, **step.constexprs)
            found.setdefault(made, set()).add(call.contract)
    return tuple(Build(made, tuple(sorted(contracts))) for made, contracts in found.items())


def _audited_calls() -> Iterator[Call]:
    forward = ("y", "residual", "rstd")
    for contract in ("ascending", "tree512"):
        for width in (128, 4096, 7168, 4097):
            for rows in (1, 65536):
                yield _audited_call(contract, rows, width, "float32", forward, leg=False)
                yield _audited_call(contract, rows, width, "bfloat16", ("grad_x", "grad_gamma"), leg=True)
        for leg, dtype in ((False, "bfloat16"), (True, "float32"), (False, "float32")):
            yield _audited_call(contract, 65536, 4096, dtype, ("grad_x",), leg=leg)


def _audited_call(contract: str, rows: int, width: int, grad_dtype: str, wanted: tuple[str, ...], leg: bool) -> Call:
    backward = "grad_x" in wanted
    dtypes = {"x": "bfloat16", "gamma": "float32"}
    if backward:
        dtypes |= {"grad_y": "bfloat16", "rstd": "float32"}
    if leg:
        dtypes |= {"grad_residual": "bfloat16", "start_gamma": "float32"}
    layouts = tuple((name, Layout(dtype, (), width % 8 == 0)) for name, dtype in dtypes.items())
    return Call("rmsnorm_residual", backward, contract, rows, (("D", width),), layouts, wanted, grad_dtype, H200)
