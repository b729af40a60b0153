"""The backward in Triton, with the bits of ``reference.py``: no atomics, nothing of size S_q x S_k, every sum in one program.

Three kernels: delta, a number per query and head; grad_k and grad_v, a tile of keys that passes all queries of all heads of its
group; grad_q, a tile of queries that passes all keys. Scores are computed twice, which is the price of the fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.runtime.triton_launch import build, halving_tree, kernel, launch, pointer, product
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.triton import (
    VARIANTS,
    aligned,
    keys_of_tile,
    load_rows,
    sequence_of,
    store_rows,
)

if TYPE_CHECKING:
    from samebits.audit.build import Build


@kernel
def _delta(  # type: ignore[no-untyped-def]
    out, grad_out, delta, POSITIONS: tl.int64, SQ: tl.int64, HEADS: tl.int64, ROWS: tl.constexpr, D: tl.constexpr
):
    """One program: ROWS of the B * S_q * H contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < POSITIONS
    d = tl.arange(0, D)
    o = load_rows(out + row * D, here, d, True).to(tl.float32)
    g = load_rows(grad_out + row * D, here, d, True).to(tl.float32)
    total = halving_tree(product(g, o), ROWS, D)
    position, h = row // HEADS, row % HEADS
    tl.store(delta + ((position // SQ) * HEADS + h) * SQ + position % SQ, total, mask=here)


@triton.jit
def _per_query(lse, delta, row, here, log2_e):  # type: ignore[no-untyped-def]
    """(lse in powers of two, delta). A query that is not here, or sees no key, gets +inf, hence p = +0."""
    logs = tl.load(lse + row, mask=here, other=float("inf"))
    logs = tl.where(logs == float("-inf"), float("inf"), logs)
    return product(logs, log2_e), tl.load(delta + row, mask=here, other=0.0)


@kernel
def _keys(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    grad_k,
    grad_v,
    cu_k,
    cu_q,
    q_batch: tl.int64,
    q_row: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    SQ: tl.int32,
    SK: tl.int32,
    DOCUMENTS: tl.int32,
    HEADS: tl.int32,
    GROUP: tl.int32,
    c: tl.float32,
    scale: tl.float32,
    log2_e: tl.float32,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: grad_k and grad_v of KEYS keys of one sequence and one key head."""
    b, tile, k0, keys, q0, queries = sequence_of(cu_k, cu_q, DOCUMENTS, SK, SQ, KEYS, False)
    kv_head = tl.program_id(1).to(tl.int64)
    key = tile * KEYS + tl.arange(0, KEYS)
    exists = key < keys
    d = tl.arange(0, D)
    mine = load_rows(k + b * k_batch + kv_head * k_head + (k0 + key) * k_row, exists, d, ALIGNED)
    values = load_rows(v + b * v_batch + kv_head * v_head + (k0 + key) * v_row, exists, d, ALIGNED)
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    shift = keys - queries
    begin = 0
    if CAUSAL:  # queries before it see none of these keys
        begin = tl.maximum(0, tile * KEYS - shift) // ROWS * ROWS
    step = tl.arange(0, ROWS)
    grad_row = HEADS.to(tl.int64) * D
    q_steps, grad_steps = step.to(tl.int64) * q_row, step.to(tl.int64) * grad_row
    for one in range(GROUP):
        h = kv_head * GROUP + one
        q_of = q + b * q_batch + h * q_head + q0 * q_row
        grad_of = grad_out + ((b * SQ + q0) * HEADS + h) * D
        numbers = (b * HEADS + h) * SQ + q0
        for start in tl.range(begin, queries, ROWS, num_stages=STAGES):
            row = start + step
            here = row < queries
            query = load_rows(q_of + start * q_row + q_steps, here, d, ALIGNED)
            grad = load_rows(grad_of + start * grad_row + grad_steps, here, d, True)
            logs, sums = _per_query(lse + numbers, delta + numbers, row, here, log2_e)
            p = tl.math.exp2(product(tl.dot(mine, tl.trans(query)), c) - logs[None, :])
            if CAUSAL:
                p = tl.where(key[:, None] <= (row + shift)[None, :], p, 0.0)
            dv = tl.dot(p.to(grad.dtype), grad, dv)
            ds = product(p, tl.dot(values, tl.trans(grad)) - sums[None, :])
            dk = tl.dot(ds.to(query.dtype), query, dk)
    at = ((b * SK + k0 + key) * (HEADS // GROUP) + kv_head) * D
    store_rows(grad_k + at, exists, d, product(dk, scale), True)
    store_rows(grad_v + at, exists, d, dv, True)


@triton.jit
def _query_block(  # type: ignore[no-untyped-def]
    query,
    grad,
    k,
    v,
    k_row,
    v_row,
    n,
    last,
    keys,
    c,
    logs,
    sums,
    dq,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    key = n + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    k_at, v_at = k + key.to(tl.int64) * k_row, v + key.to(tl.int64) * v_row
    there = key < keys if MASKED else None
    mine, values = load_rows(k_at, there, d, ALIGNED), load_rows(v_at, there, d, ALIGNED)
    p = tl.math.exp2(product(tl.dot(query, tl.trans(mine)), c) - logs[:, None])
    if MASKED:
        p = tl.where(key[None, :] <= last[:, None], p, 0.0)
    ds = product(p, tl.dot(grad, tl.trans(values)) - sums[:, None])
    return tl.dot(ds.to(mine.dtype), mine, dq)


@kernel
def _queries(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    grad_q,
    cu_q,
    cu_k,
    q_batch: tl.int64,
    q_row: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    SQ: tl.int32,
    SK: tl.int32,
    DOCUMENTS: tl.int32,
    HEADS: tl.int32,
    GROUP: tl.int32,
    c: tl.float32,
    scale: tl.float32,
    log2_e: tl.float32,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: grad_q of ROWS queries of one sequence and one head."""
    b, tile, q0, queries, k0, keys = sequence_of(cu_q, cu_k, DOCUMENTS, SQ, SK, ROWS, CAUSAL)
    h = tl.program_id(1).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    here = row < queries
    d = tl.arange(0, D)
    query = load_rows(q + b * q_batch + h * q_head + (q0 + row) * q_row, here, d, ALIGNED)
    at = ((b * SQ + q0 + row) * HEADS + h) * D
    grad = load_rows(grad_out + at, here, d, True)
    numbers = (b * HEADS + h) * SQ + q0
    logs, sums = _per_query(lse + numbers, delta + numbers, row, here, log2_e)
    k += b * k_batch + (h // GROUP) * k_head + k0 * k_row
    v += b * v_batch + (h // GROUP) * v_head + k0 * v_row
    last, end, whole = keys_of_tile(row, tile, queries, keys, ROWS, KEYS, CAUSAL)
    dq = tl.zeros((ROWS, D), tl.float32)
    for i in tl.range(0, whole, num_stages=STAGES):
        dq = _query_block(
            query, grad, k, v, k_row, v_row, i * KEYS, last, keys, c, logs, sums, dq, KEYS, D, ALIGNED, False
        )
    for i in tl.range(whole, tl.cdiv(end, KEYS), num_stages=STAGES):
        dq = _query_block(
            query, grad, k, v, k_row, v_row, i * KEYS, last, keys, c, logs, sums, dq, KEYS, D, ALIGNED, True
        )
    store_rows(grad_q + at, here, d, product(dq, scale), True)


# --- host -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Queries by keys that a program works on at a time. Multiples of 16, the group of the tensor core; never touches the bits."""

    rows: int
    keys: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    by_key: Tiling
    by_query: Tiling


DELTA_ROWS = 32


def plans(head_dim: int, causal: bool, packed: bool, arch: int) -> tuple[Plan, ...]:
    """Best first, and the first spills no register. The two accumulators of a wide head leave registers for 32 queries at a time,
    and the search for a document costs a stage here and there."""
    small = Plan(Tiling(32, 64, 8, 1), Tiling(64, 32, 4, 1))
    if arch < 90:
        return (small, Plan(Tiling(16, 64, 4, 1), Tiling(64, 16, 4, 1)))
    if head_dim == 128 and not causal and arch == 90:
        first = Plan(Tiling(32, 128, 8, 2 if packed else 3), Tiling(128, 64, 8, 3))
    elif head_dim == 128:
        first = Plan(Tiling(32, 128, 8, 1), Tiling(128, 64, 8, 2))
    else:
        wide = arch >= 100
        first = Plan(Tiling(64, 128, 8, 1 if causal or wide else 2), Tiling(128, 64, 8, 1 if packed and wide else 2))
    return (first, Plan(Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 2)), small)


def constants(tiling: Tiling, head_dim: int, causal: bool, all_aligned: bool) -> dict[str, Any]:
    tile = {"ROWS": tiling.rows, "KEYS": tiling.keys, "D": head_dim}
    return tile | {"CAUSAL": causal, "STAGES": tiling.stages, "ALIGNED": all_aligned}


def delta_of(problem: Problem, out: Tensor, grad_out: Tensor, lse: Tensor) -> Tensor:
    """Like ``lse``: the sum over d of grad_out * out, both contiguous."""
    delta = torch.empty_like(lse)
    positions = problem.batch * problem.queries * problem.heads
    if positions:
        sizes = (positions, problem.queries, problem.heads)
        fixed = {"ROWS": DELTA_ROWS, "D": problem.head_dim}
        launch(_delta, (triton.cdiv(positions, DELTA_ROWS),), out, grad_out, delta, *sizes, num_warps=4, **fixed)
    return delta


def backward(
    problem: Problem,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.backward``, on torch's current stream. ``wanted``: grad_q, and grad_k with grad_v.

    ``out``, ``lse`` and ``grad_out`` are contiguous.
    """
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = delta_of(problem, out, grad_out, lse)
    keys_of = cu_q if cu_k is None else cu_k
    strides = tuple(stride for t in (q, k, v) for stride in t.stride()[:3])
    tail = (
        *(*strides, problem.queries, problem.keys, problem.documents, problem.heads, problem.group),
        *(contracts.exponent_scale(scale), scale, contracts.LOG2_E),
    )
    dense = aligned(q, k, v)
    inputs = (q, k, v, grad_out, lse, delta)
    if wanted[1] and grad_k.numel():
        tiling = plan.by_key
        grid = (problem.programs(problem.keys, tiling.keys), problem.kv_heads)
        arguments = (*inputs, grad_k, grad_v, keys_of, cu_q, *tail)
        fixed = constants(tiling, problem.head_dim, causal, dense)
        launch(_keys, grid, *arguments, num_warps=tiling.num_warps, **fixed)
    if wanted[0] and grad_q.numel():
        tiling = plan.by_query
        grid = (problem.programs(problem.queries, tiling.rows), problem.heads)
        arguments = (*inputs, grad_q, cu_q, keys_of, *tail)
        fixed = constants(tiling, problem.head_dim, causal, dense)
        launch(_queries, grid, *arguments, num_warps=tiling.num_warps, **fixed)
    return grad_q, grad_k, grad_v


# --- audit ------------------------------------------------------------------------------------------------------------


def builds(arch: int) -> tuple[Build, ...]:
    """What runs by default on this architecture for tensors that are read 16 bytes at a time, for the audit."""
    return tuple(_builds(arch))


def _builds(arch: int) -> Iterator[Build]:
    from samebits.audit.build import Build

    served = tuple(contracts.RECIPES)
    for causal, head_dim, dtype, packed in VARIANTS:
        index = "*i64" if packed else None
        common: dict[str, str | None] = dict.fromkeys(
            ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"), pointer(dtype)
        )
        common |= {"lse": "*fp32", "delta": "*fp32"}
        common |= dict.fromkeys(("cu_q", "cu_k"), index)
        plan = plans(head_dim, causal, packed, arch)[0]
        for function, tiling in ((_keys, plan.by_key), (_queries, plan.by_query)):
            fixed = constants(tiling, head_dim, causal, True)
            yield Build(build(function, common, tiling.num_warps, **fixed), served)
        if not packed and not causal:
            yield Build(build(_delta, common, 4, ROWS=DELTA_ROWS, D=head_dim), served)
