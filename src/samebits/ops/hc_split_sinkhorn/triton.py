"""``hc_split_sinkhorn`` in Triton, with the bits of ``reference.py``: a plan moves tokens between programs, nothing else.

A tile is (ROWS, 4, 4): comb[i, j] of each token. The backward walks the steps in reverse, and a program cannot index
registers: it keeps the matrices before the row steps in a piece of scratch memory of its own, tile after tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from samebits.dispatch import Call
from samebits.ops.hc_split_sinkhorn import reference
from samebits.runtime.triton_launch import Tile, build, kernel, launch, product

if TYPE_CHECKING:
    from samebits.audit.build import Build

EPS = tl.constexpr(reference.EPS)
ROW_STEPS = tl.constexpr(reference.ITERATIONS - 1)
"""Each between two column steps."""

# --- device code ------------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """The exponential of torch on the GPU, operation for operation. Triton's own is another one, and its libdevice flushes."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 scaled, clipped, shifted, whole, rest, power, unit;
        .reg .b32 bits;
        fma.rn.f32 scaled, $1, 0f3BBB989D, 0f3F000000;
        cvt.sat.f32.f32 clipped, scaled;
        fma.rm.f32 shifted, clipped, 0f437C0000, 0f4B400001;
        add.rn.f32 whole, shifted, 0fCB40007F;
        neg.f32 whole, whole;
        fma.rn.f32 rest, $1, 0f3FB8AA3B, whole;
        fma.rn.f32 rest, $1, 0f32A57060, rest;
        ex2.approx.ftz.f32 power, rest;
        mov.b32 bits, shifted;
        shl.b32 bits, bits, 23;
        mov.b32 unit, bits;
        mul.rn.f32 $0, power, unit;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + _exp(-x))


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _over_sources(m, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(m[0] + m[1]) + (m[2] + m[3]) over i, as (ROWS, 1, 4)."""
    return tl.sum(tl.sum(tl.reshape(m, (ROWS, 2, 2, 4)), 2), 1)[:, None, :]


@triton.jit
def _over_destinations(m, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(m[0] + m[1]) + (m[2] + m[3]) over j, as (ROWS, 4, 1)."""
    return tl.sum(tl.sum(tl.reshape(m, (ROWS, 4, 2, 2)), 3), 2)[:, :, None]


@triton.jit
def _over(m, d, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.div_rn(m, tl.broadcast_to(d, (ROWS, 4, 4)))


@triton.jit
def _column_step(m, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    return _over(m, _over_sources(m, ROWS) + EPS, ROWS)


@triton.jit
def _row_step(m, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    return _over(m, _over_destinations(m, ROWS) + EPS, ROWS)


@triton.jit
def _column_step_backward(grad, m, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    c = _over_sources(m, ROWS) + EPS
    along = _over_sources(product(grad, m), ROWS)
    return _over(grad, c, ROWS) - tl.div_rn(along, c * c)


@triton.jit
def _row_step_backward(grad, m, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    c = _over_destinations(m, ROWS) + EPS
    along = _over_destinations(product(grad, m), ROWS)
    return _over(grad, c, ROWS) - tl.div_rn(along, c * c)


@triton.jit
def _softmax(x, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Over j."""
    largest = tl.reduce(tl.reduce(tl.reshape(x, (ROWS, 4, 2, 2)), 3, _larger), 2, _larger)[:, :, None]
    e = _exp(x - largest)
    return _over(e, _over_destinations(e, ROWS), ROWS)


@triton.jit
def _pointers(rows, stream, COUNT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where COUNT times four numbers of each token are. ALIGNED: every four start on 16 bytes."""
    if COUNT == 1:
        at = rows[:, None] + tl.arange(0, 4)[None, :]
        return tl.multiple_of(at, (1, 16)) if ALIGNED else at
    else:
        at = rows[:, None, None] + (tl.arange(0, 4)[None, :, None] * stream + tl.arange(0, 4)[None, None, :])
        return tl.multiple_of(at, (1, 1, 16)) if ALIGNED else at


@triton.jit
def _four(rows, here, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four numbers of each token, as (ROWS, 4)."""
    return tl.load(_pointers(rows, 0, 1, ALIGNED), here[:, None], 0.0)


@triton.jit
def _sixteen(rows, stream, here, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A matrix of each token, as (ROWS, 4, 4)."""
    return tl.load(_pointers(rows, stream, 4, ALIGNED), here[:, None, None], 0.0)


@triton.jit
def _put_four(rows, here, values):  # type: ignore[no-untyped-def]
    tl.store(_pointers(rows, 0, 1, True), values, here[:, None])


@triton.jit
def _put_sixteen(rows, here, values):  # type: ignore[no-untyped-def]
    tl.store(_pointers(rows, 4, 4, True), values, here[:, None, None])


@kernel
def _forward(  # type: ignore[no-untyped-def]
    logits,
    pre,
    post,
    comb,
    logits_row: tl.int64,
    T: tl.int64,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: ROWS tokens."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = token < T
    x = logits + token * logits_row
    _put_four(pre + token * 4, here, _sigmoid(_four(x, here, ALIGNED)) + EPS)
    _put_four(post + token * 4, here, 2.0 * _sigmoid(_four(x + 4, here, ALIGNED)))
    m = _column_step(_softmax(_sixteen(x + 8, 4, here, ALIGNED), ROWS) + EPS, ROWS)
    for _ in tl.range(0, ROW_STEPS, num_stages=1):
        m = _column_step(_row_step(m, ROWS), ROWS)
    _put_sixteen(comb + token * 16, here, m)


@kernel
def _backward(  # type: ignore[no-untyped-def]
    grad_pre,
    grad_post,
    grad_comb,
    logits,
    grad_logits,
    scratch,
    pre_row: tl.int64,
    post_row: tl.int64,
    comb_row: tl.int64,
    comb_stream: tl.int64,
    logits_row: tl.int64,
    T: tl.int64,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: tiles of ROWS tokens, as far apart as there are programs. ``scratch`` is (programs, 19, ROWS, 16)."""
    kept = scratch + (tl.program_id(0).to(tl.int64) * (ROW_STEPS * ROWS) + tl.arange(0, ROWS)) * 16
    everyone = tl.full((ROWS,), True, tl.int1)
    for first in tl.range(tl.program_id(0).to(tl.int64) * ROWS, T, tl.num_programs(0) * ROWS, num_stages=1):
        token = first + tl.arange(0, ROWS)
        here = token < T
        x = logits + token * logits_row
        out = grad_logits + token * 24
        slope = _sigmoid(_four(x, here, ALIGNED))
        slope = slope * (1.0 - slope)
        _put_four(out, here, _four(grad_pre + token * pre_row, here, ALIGNED) * slope)
        slope = _sigmoid(_four(x + 4, here, ALIGNED))
        slope = 2.0 * (slope * (1.0 - slope))
        _put_four(out + 4, here, _four(grad_post + token * post_row, here, ALIGNED) * slope)

        probabilities = _softmax(_sixteen(x + 8, 4, here, ALIGNED), ROWS)
        m = _column_step(probabilities + EPS, ROWS)
        for n in tl.range(0, ROW_STEPS, num_stages=1):
            _put_sixteen(kept + n * (ROWS * 16), everyone, m)
            m = _column_step(_row_step(m, ROWS), ROWS)
        tl.debug_barrier()  # another thread may read what this one kept
        grad = _sixteen(grad_comb + token * comb_row, comb_stream, here, ALIGNED)
        for n in tl.range(0, ROW_STEPS, num_stages=1):
            m = _sixteen(kept + (ROW_STEPS - 1 - n) * (ROWS * 16), 4, everyone, True)
            grad = _column_step_backward(grad, _row_step(m, ROWS), ROWS)
            grad = _row_step_backward(grad, m, ROWS)
        grad = _column_step_backward(grad, probabilities + EPS, ROWS)
        inner = _over_destinations(product(grad, probabilities), ROWS)
        _put_sixteen(out + 8, here, probabilities * (grad - inner))
        tl.debug_barrier()  # everything has been read before the next tile is kept


# --- host code --------------------------------------------------------------------------------------------------------

PROGRAMS = 2048
"""Of the backward at most, so that its scratch memory, 1216 bytes per token of a tile, does not grow with the batch."""
_PLANS = (Tile(8, 16, 1), Tile(32, 16, 1), Tile(64, 16, 4))
"""One warp exchanges nothing through shared memory."""


def plans(call: Call) -> tuple[Tile, ...]:
    return _PLANS


def run(
    call: Call, plan: Tile, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    logits = inputs["logits"]
    programs = triton.cdiv(call.rows, plan.rows)
    sizes = (logits.stride(0), call.rows)
    options: dict[str, Any] = {"num_warps": plan.num_warps, "ROWS": plan.rows, "ALIGNED": call.aligned}
    if not call.backward:
        launch(_forward, (programs,), logits, results["pre"], results["post"], results["comb"], *sizes, **options)
        return
    programs = min(programs, PROGRAMS)
    scratch = logits.new_empty(programs * (reference.ITERATIONS - 1) * plan.rows * 16)
    pre, post, comb = inputs["grad_pre"], inputs["grad_post"], inputs["grad_comb"]
    tensors = (pre, post, comb, logits, results["grad_logits"], scratch)
    strides = (pre.stride(0), post.stride(0), comb.stride(0), comb.stride(1))
    launch(_backward, (programs,), *tensors, *strides, *sizes, **options)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    from samebits.audit.build import Build

    pointers: dict[str, str | None] = dict.fromkeys((*_forward.arg_names, *_backward.arg_names), "*fp32")
    return tuple(
        Build(build(function, pointers, plan.num_warps, ROWS=plan.rows, ALIGNED=aligned), ("ascending",))
        for function in (_forward, _backward)
        for plan in _PLANS
        for aligned in (True, False)
    )
