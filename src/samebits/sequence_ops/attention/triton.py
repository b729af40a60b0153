"""The forward in Triton, with the bits of ``reference.py``. A program owns a tile of queries of one sequence and one head.

The tile, the warps and the stages move work, never an addition: every query passes the key blocks of its own sequence in the
contract's order, and a block that lies wholly behind a causal query leaves it as it was (a = 1, p = +0).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.checks import layout_of
from samebits.exact.special import LOG2_SERIES, LOG2_SPLIT
from samebits.runtime.triton_launch import build, kernel, launch, pointer, product
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.contracts import Recipe

if TYPE_CHECKING:
    from samebits.audit.build import Build

# --- where a program works --------------------------------------------------------------------------------------------


@triton.jit
def sequence_of(cu_tiled, cu_other, DOCUMENTS, TILED, OTHER, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(batch entry, tile, first and number of the tiled positions, first and number of the others) of this program.

    Packed: program i works on the last document d with cu_tiled[d] // BLOCK + d <= i, as ``place.cuh`` explains; one behind the
    last tile of its document gets none of the others, and a tile without positions. ``LAST_FIRST`` starts the tiles that have
    most to do, under a causal mask, first.
    """
    index = tl.program_id(0)
    if cu_tiled is None:
        per_sequence = tl.cdiv(TILED, BLOCK)
        tile = index % per_sequence
        if LAST_FIRST:
            tile = per_sequence - 1 - tile
        zero = tl.zeros((), tl.int64)
        return (index // per_sequence).to(tl.int64), tile, zero, TILED, zero, OTHER
    else:
        document, behind = index * 0, DOCUMENTS
        while behind - document > 1:
            middle = (document + behind) // 2
            before = tl.load(cu_tiled + middle).to(tl.int32) // BLOCK + middle <= index
            document, behind = tl.where(before, middle, document), tl.where(before, behind, middle)
        tiled, other = tl.load(cu_tiled + document), tl.load(cu_other + document)
        count = (tl.load(cu_tiled + document + 1) - tiled).to(tl.int32)
        other_count = (tl.load(cu_other + document + 1) - other).to(tl.int32)
        tile, tiles = index - (tiled.to(tl.int32) // BLOCK + document), tl.cdiv(count, BLOCK)
        here = tile < tiles
        if LAST_FIRST:
            tile = tl.where(here, tiles - 1 - tile, tile)
        return tl.zeros((), tl.int64), tile, tiled, count, other, tl.where(here, other_count, 0)


@triton.jit
def load_rows(rows, here, d, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(R, D) elements of the rows that start at ``rows`` (R,); +0 in rows that are not ``here`` (None: all are).

    ``ALIGNED`` changes no value: it promises that every 8 elements start on 16 bytes.
    """
    pointers = rows[:, None] + d[None, :]
    if ALIGNED:  # a hint counts only on the operation that made the value
        pointers = tl.multiple_of(pointers, (1, 16))
    if here is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=here[:, None], other=0.0)


@triton.jit
def store_rows(rows, here, d, values, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The counterpart of :func:`load_rows`: ``values`` rounded once, to nearest even, to the type of the tensor."""
    pointers = rows[:, None] + d[None, :]
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=here[:, None])


@triton.jit
def keys_of_tile(row, tile, queries, keys, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the last key that each query sees, the key behind the last of the tile, blocks of keys that all of its queries see)."""
    if CAUSAL:  # the last query of a sequence sees its last key
        shift = keys - queries
        last = tl.minimum(row + shift, keys - 1)
        end = tl.maximum(0, tl.minimum(keys, (tile + 1) * ROWS + shift))
        whole = tl.maximum(0, tl.minimum(keys, tile * ROWS + 1 + shift)) // KEYS
    else:
        last = tl.zeros((ROWS,), tl.int32) + (keys - 1)
        end = keys
        whole = keys // KEYS
    return last, end, whole


# --- arithmetic -------------------------------------------------------------------------------------------------------


@triton.jit
def _own(x, ROWS: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, 4, KEYS / 4): the columns 8j + 2i and 8j + 2i + 1 that partial i owns, ascending; they lie in one thread."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, KEYS // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, 4, KEYS // 4))


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 4, 2, WIDTH // 2)), (0, 1, 3, 2)))


@triton.jit
def _first(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, 4): x[..., 0] of (ROWS, 4, WIDTH), where the sums are."""
    if WIDTH == 1:
        return tl.reshape(x, (ROWS, 4))
    else:
        first, _second = _halves(x, ROWS, WIDTH)
        return _first(first, ROWS, WIDTH // 2)


@triton.jit
def _fold_own(acc, a, terms, ROWS: tl.constexpr, WIDTH: tl.constexpr, FUSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + terms[..., 0] + terms[..., 1] + ... of (ROWS, 4, WIDTH), ascending; ``FUSED``: the first is fma(acc, a, term)."""
    if WIDTH == 1:
        last = tl.reshape(terms, (ROWS, 4))
        if FUSED:
            return tl.fma(acc, a, last)
        else:
            return acc + last
    else:
        first, second = _halves(terms, ROWS, WIDTH)
        acc = _fold_own(acc, a, first, ROWS, WIDTH // 2, FUSED)
        return _fold_own(acc, a, second, ROWS, WIDTH // 2, False)


@triton.jit
def _row_sums(sums, a, p, ROWS: tl.constexpr, KEYS: tl.constexpr, FA2: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four partial sums of a row after this block.

    The factor of a row takes the way of the terms, so that it lies where the sums do: as a column of its own it would draw
    them into the layout of the tensor core, which holds each of them 32 times.
    """
    factor = _first(_own(tl.broadcast_to(a[:, None], (ROWS, KEYS)), ROWS, KEYS), ROWS, KEYS // 4)
    own = _own(p, ROWS, KEYS)
    if FA2:
        return _fold_own(sums, factor, own, ROWS, KEYS // 4, True)
    else:
        local = _fold_own(tl.zeros((ROWS, 4), tl.float32), factor, own, ROWS, KEYS // 4, False)
        return tl.fma(sums, factor, local)


@triton.jit
def _log2(  # type: ignore[no-untyped-def]
    x, SPLIT: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr
):
    """``samebits.exact.special.log2_portable``."""
    word = x.to(tl.int32, bitcast=True)
    fraction = ((word & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    upper = fraction > SPLIT
    exponent = (word >> 23) - 127 + upper.to(tl.int32)
    f = tl.where(upper, product(fraction, 0.5), fraction)
    z = tl.div_rn(f - 1.0, f + 1.0)
    w = product(z, z)
    p = product(w, C4) + C3
    p = product(p, w) + C2
    p = product(p, w) + C1
    p = product(p, w) + C0
    return tl.where(x < float("inf"), exponent.to(tl.float32) + product(z, p), x)


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    k_row,
    v_row,
    n,
    last,
    keys,
    c,
    m,
    sums,
    o,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    FA2: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One key block: the new maximum, partial sums and accumulator of every query of the tile."""
    key = n + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    k_at, v_at = k + key.to(tl.int64) * k_row, v + key.to(tl.int64) * v_row
    if MASKED:
        s = tl.dot(q, tl.trans(load_rows(k_at, key < keys, d, ALIGNED)))
        s = tl.where(key[None, :] <= last[:, None], s, float("-inf"))
    else:
        s = tl.dot(q, tl.trans(load_rows(k_at, None, d, ALIGNED)))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    scaled = product(base, c)
    a = tl.math.exp2(product(m - base, c) if FA2 else product(m, c) - scaled)
    p = tl.math.exp2(product(s, c) - scaled[:, None])
    sums = _row_sums(sums, a, p, ROWS, KEYS, FA2)
    o = product(o, a[:, None])
    values = load_rows(v_at, key < keys if MASKED else None, d, ALIGNED)
    o = tl.dot(p.to(values.dtype), values, o)
    return m_new, sums, o


@kernel
def _forward(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
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
    ln2: tl.float32,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    FA2: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    C4: tl.constexpr,
):
    """One program: ROWS queries of one sequence and one head, all of their keys in blocks of KEYS."""
    b, tile, q0, queries, k0, keys = sequence_of(cu_q, cu_k, DOCUMENTS, SQ, SK, ROWS, CAUSAL)
    h = tl.program_id(1).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    here = row < queries
    d = tl.arange(0, D)
    mine = load_rows(q + b * q_batch + h * q_head + (q0 + row) * q_row, here, d, ALIGNED)
    k += b * k_batch + (h // GROUP) * k_head + k0 * k_row
    v += b * v_batch + (h // GROUP) * v_head + k0 * v_row
    last, end, whole = keys_of_tile(row, tile, queries, keys, ROWS, KEYS, CAUSAL)
    blocks = tl.cdiv(end, KEYS)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS, 4), tl.float32)
    o = tl.zeros((ROWS, D), tl.float32)
    if FA2:
        for i in tl.range(0, blocks - whole, num_stages=STAGES):
            n = (blocks - 1 - i) * KEYS
            m, sums, o = _block(
                mine, k, v, k_row, v_row, n, last, keys, c, m, sums, o, ROWS, KEYS, D, FA2, ALIGNED, True
            )
        for i in tl.range(0, whole, num_stages=STAGES):
            n = (whole - 1 - i) * KEYS
            m, sums, o = _block(
                mine, k, v, k_row, v_row, n, last, keys, c, m, sums, o, ROWS, KEYS, D, FA2, ALIGNED, False
            )
    else:
        for i in tl.range(0, whole, num_stages=STAGES):
            m, sums, o = _block(
                mine, k, v, k_row, v_row, i * KEYS, last, keys, c, m, sums, o, ROWS, KEYS, D, FA2, ALIGNED, False
            )
        for i in tl.range(whole, blocks, num_stages=STAGES):
            m, sums, o = _block(
                mine, k, v, k_row, v_row, i * KEYS, last, keys, c, m, sums, o, ROWS, KEYS, D, FA2, ALIGNED, True
            )
    even, odd = tl.split(tl.reshape(sums, (ROWS, 2, 2)))  # (0, 2) and (1, 3)
    if FA2:  # (0 + 2) + (1 + 3)
        first, second = tl.split(tl.permute(tl.reshape(tl.join(even, odd), (ROWS, 2, 2)), (0, 2, 1)))
        low, high = tl.split(first + second)
    else:  # (0 + 1) + (2 + 3)
        low, high = tl.split(even + odd)
    total = low + high
    inverse = tl.div_rn(1.0, total) if FA2 else 1.0 / total
    nothing = total == 0.0
    o = tl.where(nothing[:, None], 0.0, product(o, inverse[:, None]))
    position = q0 + row
    store_rows(out + ((b * SQ + position) * HEADS + h) * D, here, d, o, True)
    logs = product(m, scale) + product(_log2(tl.where(nothing, 1.0, total), SPLIT, C0, C1, C2, C3, C4), ln2)
    tl.store(lse + (b * HEADS + h) * SQ + position, tl.where(nothing, float("-inf"), logs), mask=here)


# --- host -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Tiles of one launch. Never touches the bits."""

    rows: int
    num_warps: int
    stages: int


def plans(problem: Problem, recipe: Recipe, arch: int) -> tuple[Plan, ...]:
    """Best first, and the first spills no register. Below sm_90 there is no room for a second pair of wide key blocks."""
    if arch < 90:
        return (Plan(64, 8, 1 if problem.head_dim == 128 else 2), Plan(128, 8, 1))
    if arch >= 100:
        return (Plan(128, 8, 1), Plan(64, 8, 2))
    spills = problem.head_dim == 128 and recipe.kv_block(128) == 128  # with four warps, which are faster where they fit
    wide, narrow = Plan(128, 8, 2), Plan(64, 8 if spills else 4, 2)
    return (narrow, wide) if problem.queries_each <= 64 else (wide, narrow)


def aligned(*tensors: Tensor) -> bool:
    """Whether every row of every tensor can be read 16 bytes at a time.

    The stride of the rows counts even where there is one row: a tile adds it to addresses that it then does not read, and
    vector copies want those aligned too.
    """
    return all(layout_of(t).aligned and t.stride(1) * t.element_size() % 16 == 0 for t in tensors)


def constants(recipe: Recipe, head_dim: int, causal: bool, plan: Plan, all_aligned: bool) -> dict[str, Any]:
    series = {f"C{i}": contracts.fp32(value) for i, value in enumerate(LOG2_SERIES)}
    own = {"KEYS": recipe.kv_block(head_dim), "FA2": recipe.last_block_first, "SPLIT": LOG2_SPLIT}
    tile = {"ROWS": plan.rows, "D": head_dim, "STAGES": plan.stages, "ALIGNED": all_aligned}
    return tile | {"CAUSAL": causal} | own | series


def forward(
    problem: Problem,
    recipe: Recipe,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``, on torch's current stream."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(problem.batch, problem.heads, problem.queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    keys_of = cu_q if cu_k is None else cu_k
    strides = (stride for t in (q, k, v) for stride in t.stride()[:3])
    sizes = (problem.queries, problem.keys, problem.documents, problem.heads, problem.group)
    numbers = (contracts.exponent_scale(scale), scale, contracts.LN_2)
    arguments = (q, k, v, out, lse, cu_q, keys_of, *strides, *sizes, *numbers)
    fixed = constants(recipe, problem.head_dim, causal, plan, aligned(q, k, v))
    grid = (problem.programs(problem.queries, plan.rows), problem.heads)
    launch(_forward, grid, *arguments, num_warps=plan.num_warps, **fixed)
    return out, lse


# --- audit ------------------------------------------------------------------------------------------------------------


def builds(arch: int) -> tuple[Build, ...]:
    """What runs by default on this architecture for tensors that are read 16 bytes at a time, for the audit."""
    return tuple(_builds(arch))


VARIANTS = tuple(itertools.product((False, True), contracts.HEAD_DIMS, contracts.DTYPES, (False, True)))
"""Causal, head_dim, dtype, packed: what a kernel is specialised by, beside its tiles and the contract."""


def _builds(arch: int) -> Iterator[Build]:
    from samebits.audit.build import Build

    for recipe, (causal, head_dim, dtype, packed) in itertools.product(contracts.RECIPES.values(), VARIANTS):
        index = "*i64" if packed else None
        pointers: dict[str, str | None] = dict.fromkeys(("q", "k", "v", "out"), pointer(dtype))
        pointers |= {"lse": "*fp32"}
        pointers |= dict.fromkeys(("cu_q", "cu_k"), index)
        for queries in (1, 4096):
            plan = plans(Problem(1, queries, 4096, 8, 8, head_dim, packed, 1), recipe, arch)[0]
            fixed = constants(recipe, head_dim, causal, plan, True)
            yield Build(build(_forward, pointers, plan.num_warps, **fixed), (recipe.contract.name,))
