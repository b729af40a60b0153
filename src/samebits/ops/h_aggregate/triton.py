"""``h_aggregate`` in Triton, with the bits of ``reference.py``: a plan moves work between programs, never an addition."""

from __future__ import annotations

from collections.abc import Iterator
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

# --- device code ------------------------------------------------------------------------------------------------------


@kernel
def _forward(  # type: ignore[no-untyped-def]
    pre,
    residual,
    hidden,
    pre_row: tl.int64,
    residual_row: tl.int64,
    residual_stream: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows by WIDTH columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    gain = pre + row * pre_row
    g0 = tl.load(gain, row < T, 0.0)[:, None]
    g1 = tl.load(gain + 1, row < T, 0.0)[:, None]
    g2 = tl.load(gain + 2, row < T, 0.0)[:, None]
    g3 = tl.load(gain + 3, row < T, 0.0)[:, None]
    here = (row < T)[:, None]
    streams = (residual + row * residual_row)[:, None]
    p0 = product(g0, load(streams, here, d, D, ALIGNED).to(tl.float32))
    p1 = product(g1, load(streams + residual_stream, here, d, D, ALIGNED).to(tl.float32))
    p2 = product(g2, load(streams + 2 * residual_stream, here, d, D, ALIGNED).to(tl.float32))
    p3 = product(g3, load(streams + 3 * residual_stream, here, d, D, ALIGNED).to(tl.float32))
    store((hidden + row * D)[:, None], here, d, D, (p0 + p1) + (p2 + p3), ALIGNED)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    grad_hidden,
    pre,
    residual,
    grad_residual,
    grad_row,
    pre_row,
    residual_row,
    residual_stream,
    row,
    T,
    d,
    D,
    ALIGNED: tl.constexpr,
):
    """(ROWS, 4, WIDTH) terms grad_hidden[d] * residual[i, d], and, where asked, grad_residual[i, d] on the way."""
    d = d[None, None, :]
    i = tl.arange(0, 4)[None, :]
    stream_here = (row < T)[:, None] & (i < 4)
    row_here = (row < T)[:, None, None]
    upstream = load((grad_hidden + row * grad_row)[:, None, None], row_here, d, D, ALIGNED).to(tl.float32)
    if grad_residual is not None:
        gain = tl.load((pre + row * pre_row)[:, None] + i, stream_here, 0.0)[:, :, None]
        out = (grad_residual + (row[:, None] * 4 + i) * D)[:, :, None]
        store(out, stream_here[:, :, None], d, D, gain * upstream, ALIGNED)
    streams = ((residual + row * residual_row)[:, None] + i * residual_stream)[:, :, None]
    return product(upstream, load(streams, stream_here[:, :, None], d, D, ALIGNED).to(tl.float32))


@kernel
def _backward_ascending(  # type: ignore[no-untyped-def]
    grad_hidden,
    pre,
    residual,
    grad_pre,
    grad_residual,
    grad_row: tl.int64,
    pre_row: tl.int64,
    residual_row: tl.int64,
    residual_stream: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: the 4 * ROWS chains of ROWS rows, one lane each, over ascending d. None: gradient not wanted."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS * 4,), tl.float32)
    for start in tl.range(0, D, WIDTH, num_stages=STAGES):
        d = start + tl.arange(0, WIDTH)
        terms = _products(
            grad_hidden,
            pre,
            residual,
            grad_residual,
            grad_row,
            pre_row,
            residual_row,
            residual_stream,
            row,
            T,
            d,
            D,
            ALIGNED,
        )
        if grad_pre is not None:
            acc = left_fold(acc, tl.reshape(terms, (ROWS * 4, WIDTH)), ROWS * 4, WIDTH)
    if grad_pre is not None:
        chain = tl.program_id(0).to(tl.int64) * (ROWS * 4) + tl.arange(0, ROWS * 4)
        tl.store(grad_pre + chain, acc, chain < T * 4)


@kernel
def _backward_tree256(  # type: ignore[no-untyped-def]
    grad_hidden,
    pre,
    residual,
    grad_pre,
    grad_residual,
    grad_row: tl.int64,
    pre_row: tl.int64,
    residual_row: tl.int64,
    residual_stream: tl.int64,
    T: tl.int64,
    D: tl.int32,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS rows. Partial u of a chain takes d = u, u + 256, ...; then the tree. None: not wanted."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, 4, 256), tl.float32)
    for start in tl.range(0, D, 256, num_stages=STAGES):
        d = start + tl.arange(0, 256)
        terms = _products(
            grad_hidden,
            pre,
            residual,
            grad_residual,
            grad_row,
            pre_row,
            residual_row,
            residual_stream,
            row,
            T,
            d,
            D,
            ALIGNED,
        )
        if grad_pre is not None:
            acc += terms
    if grad_pre is not None:
        groups = halving_tree(tl.reshape(acc, (ROWS * 32, 32)), ROWS * 32, 32)
        total = halving_tree(tl.reshape(groups, (ROWS * 4, 8)), ROWS * 4, 8)
        chain = tl.program_id(0).to(tl.int64) * (ROWS * 4) + tl.arange(0, ROWS * 4)
        tl.store(grad_pre + chain, total, chain < T * 4)


# --- host code --------------------------------------------------------------------------------------------------------


def plans(call: Call) -> tuple[Tile, ...]:
    if not call.backward:
        width = min(1024, max(8, triton.next_power_of_2(call.size("D"))))
        rows = 1024 // width
        return Tile(rows, width, 4), Tile(2 * rows, width, 8), Tile(2 * rows, max(8, width // 2), 2)
    if call.contract == "ascending":
        return Tile(8, 64 if aligned(call, "D") else 32, 1, stages=3), Tile(32, 32, 4, stages=2), Tile(2, 64, 1)
    return Tile(1, 256, 1), Tile(1, 256, 4, stages=3), Tile(4, 256, 4)


def run(
    call: Call, plan: Tile, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    width = call.size("D")
    pre, residual = inputs["pre"], inputs["residual"]
    strides = (pre.stride(0), residual.stride(0), residual.stride(1), call.rows, width)
    programs = triton.cdiv(call.rows, plan.rows)
    function, constexprs = _variant(call, plan)
    if not call.backward:
        grid = (programs, triton.cdiv(width, plan.width))
        launch(function, grid, pre, residual, results["hidden"], *strides, num_warps=plan.num_warps, **constexprs)
        return
    upstream = inputs["grad_hidden"]
    outputs = (results.get("grad_pre"), results.get("grad_residual"))
    arguments = (upstream, pre, residual, *outputs, upstream.stride(0), *strides)
    launch(function, (programs,), *arguments, num_warps=plan.num_warps, **constexprs)


def _variant(call: Call, plan: Tile) -> tuple[Any, dict[str, int | bool]]:
    """The kernel of a call and its constexprs: with the dtypes, everything that decides what is compiled."""
    constexprs: dict[str, int | bool] = {"ROWS": plan.rows, "ALIGNED": aligned(call, "D")}
    if not call.backward:
        return _forward, constexprs | {"WIDTH": plan.width}
    if call.contract == "ascending":
        return _backward_ascending, constexprs | {"WIDTH": plan.width, "STAGES": plan.stages}
    return _backward_tree256, constexprs | {"STAGES": plan.stages}


def builds() -> tuple[Build, ...]:
    """What runs at the tuned widths and at a generic one, for the audit."""
    from samebits.audit.build import Build

    found: dict[Any, Build] = {}
    for call in _audited_calls():
        plan = plans(call)[0]
        function, constexprs = _variant(call, plan)
        dtypes = {name: pointer(layout.dtype) for name, layout in call.layouts}
        outputs = {"hidden": "*bf16", "grad_pre": "*fp32", "grad_residual": pointer(call.grad_dtype)}
        pointers = dtypes | {name: kind if name in call.wanted else None for name, kind in outputs.items()}
        contracts = (call.contract,) if call.backward else ("ascending", "tree256")
        made = build(function, pointers, plan.num_warps, **constexprs)
        found.setdefault(made, Build(made, contracts))
    return tuple(found.values())


def _audited_calls() -> Iterator[Call]:
    both = ("grad_pre", "grad_residual")
    for width in (4096, 7168, 4097):
        yield _audited_call("ascending", width, "bfloat16", "float32", ("hidden",))
        for contract in ("ascending", "tree256"):
            yield _audited_call(contract, width, "bfloat16", "bfloat16", both)
            if width % 8 == 0:
                yield _audited_call(contract, width, "float32", "float32", both)
                yield _audited_call(contract, width, "bfloat16", "float32", both)
                for one in both:
                    yield _audited_call(contract, width, "bfloat16", "bfloat16", (one,))


def _audited_call(contract: str, width: int, upstream: str, grad_dtype: str, wanted: tuple[str, ...]) -> Call:
    backward = wanted != ("hidden",)
    dtypes = {"grad_hidden": upstream} if backward else {}
    dtypes |= {"pre": "float32", "residual": "bfloat16"}
    layouts = tuple((name, Layout(dtype, (), width % 8 == 0)) for name, dtype in dtypes.items())
    return Call("h_aggregate", backward, contract, 4096, (("D", width),), layouts, wanted, grad_dtype, H200)
