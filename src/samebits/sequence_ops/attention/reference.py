"""The bits of both contracts in plain torch: one rounding per operation, matrix products as the tensor core adds them.

A sequence at a time. Packed documents are read on the host, and the backward holds S_q x S_k values: this is the definition, for
any device, not a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.exact import fold
from samebits.exact.fma import fma
from samebits.exact.special import ex2_approx, log2_portable, rcp_approx
from samebits.exact.tensor_core import chain
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.contracts import LN_2, LOG2_E, Recipe, exponent_scale, fp32

Place = tuple[int, slice, slice]
"""A sequence: its batch entry, its queries and its keys."""


def forward(
    problem: Problem,
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out like q, and lse (B, H, S_q) FP32: the natural logarithm of the sum of exp(scale * s)."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(problem.batch, problem.heads, problem.queries, dtype=torch.float32)
    for b, queries, keys in sequences(problem, cu_q, cu_k):
        rows, mine, values = (_by_head(t, b, at, problem.heads) for t, at in ((q, queries), (k, keys), (v, keys)))
        result, logs = _rows(recipe, rows, mine, values, causal, scale)
        out[b, queries] = result.transpose(0, 1)
        lse[b, :, queries] = logs
    return out, lse


def sequences(problem: Problem, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[Place]:
    if not problem.packed:
        for b in range(problem.batch):
            yield b, slice(0, problem.queries), slice(0, problem.keys)
        return
    assert cu_q is not None
    bounds_q: list[int] = cu_q.tolist()
    bounds_k: list[int] = bounds_q if cu_k is None else cu_k.tolist()
    for i in range(problem.documents):
        yield 0, slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])


def _by_head(tensor: Tensor, b: int, place: slice, heads: int) -> Tensor:
    """(H, S, D); a key head stands once for each query head of its group."""
    part = tensor[b, place].transpose(0, 1)
    return part.repeat_interleave(heads // part.shape[0], 0) if part.shape[0] != heads else part


def visible(queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
    """(S_q, S_k). Causal: the last query sees every key, the one before it all but the last, ..."""
    if not causal:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)
    last = torch.arange(queries, device=device)[:, None] + (keys - queries)
    return torch.arange(keys, device=device)[None] <= last


# --- forward ----------------------------------------------------------------------------------------------------------


def _rows(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(H, S_q, D) in the dtype of q, and (H, S_q) FP32, of one sequence."""
    (heads, queries, head_dim), keys = q.shape, k.shape[1]
    c = exponent_scale(scale)
    seen = visible(queries, keys, causal, q.device)
    m = torch.full((heads, queries), -math.inf, device=q.device)
    sums = torch.zeros(heads, queries, 4, device=q.device)
    o = torch.zeros(heads, queries, head_dim, device=q.device)
    size = recipe.kv_block(head_dim)
    starts = range(0, keys, size)
    for n in reversed(starts) if recipe.last_block_first else starts:
        block = slice(n, min(n + size, keys))
        s = chain(q, k[:, block]).masked_fill(~seen[:, block], -math.inf)
        m_new = torch.maximum(m, s.amax(-1))
        base = torch.where(m_new == -math.inf, 0.0, m_new)  # a row that has seen no key yet
        a = ex2_approx((m - base) * c) if recipe.last_block_first else ex2_approx(m * c - base * c)
        p = ex2_approx(s * c - (base * c)[..., None])
        sums = _row_sums(recipe, sums, a, torch.nn.functional.pad(p, (0, n + size - block.stop)))
        o = chain(p.to(v.dtype), v[:, block].transpose(-1, -2), o * a[..., None])
        m = m_new
    l0, l1, l2, l3 = sums.unbind(-1)
    total = (l0 + l2) + (l1 + l3) if recipe.last_block_first else (l0 + l1) + (l2 + l3)
    inverse = 1.0 / total if recipe.last_block_first else rcp_approx(total)  # fa2: div.rn, IEEE
    nothing = total == 0.0
    out = torch.where(nothing[..., None], 0.0, o * inverse[..., None]).to(q.dtype)
    lse = m * fp32(scale) + log2_portable(torch.where(nothing, 1.0, total)) * LN_2
    return out, torch.where(nothing, -math.inf, lse)


def _row_sums(recipe: Recipe, sums: Tensor, a: Tensor, p: Tensor) -> Tensor:
    """The four partial sums of a row: partial i owns columns 8j + 2i and 8j + 2i + 1, as a thread of a tensor-core tile does.

    A key that is not there has p = +0, which changes no sum of terms that are not negative.
    """
    own = p.unflatten(-1, (-1, 4, 2)).transpose(-3, -2).flatten(-2)
    scale = a[..., None].expand_as(sums)
    if not recipe.last_block_first:
        return fma(sums, scale, fold.left_fold(own, -1))
    sums = fma(sums, scale, own[..., 0])
    for i in range(1, own.shape[-1]):
        sums = sums + own[..., i]
    return sums


# --- backward ---------------------------------------------------------------------------------------------------------


def backward(
    problem: Problem,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like q, k and v. Both contracts have this one arithmetic, on their own out and lse."""
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for b, queries, keys in sequences(problem, cu_q, cu_k):
        rows, outs, grads = (_by_head(t, b, queries, problem.heads) for t in (q, out, grad_out))
        mine, values = (_by_head(t, b, keys, problem.heads) for t in (k, v))
        logs = lse[b, :, queries]
        results = _gradients(problem.group, rows, outs, grads, mine, values, logs, causal, scale)
        for grad, result, place in zip((grad_q, grad_k, grad_v), results, (queries, keys, keys), strict=True):
            grad[b, place] = result.transpose(0, 1).to(grad.dtype)
    return grad_q, grad_k, grad_v


def delta_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """sum over d of grad_out * out, whose products are exact in FP32."""
    return fold.halving_tree(grad_out.float() * out.float())


def _gradients(
    group: int,
    q: Tensor,
    out: Tensor,
    grad_out: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(H, S_q, D), (H_kv, S_k, D) and (H_kv, S_k, D) FP32, of one sequence."""
    heads, queries, keys, narrow = q.shape[0], q.shape[1], k.shape[1], q.dtype
    seen = visible(queries, keys, causal, q.device)
    delta = delta_of(out, grad_out)
    p = ex2_approx(chain(q, k) * exponent_scale(scale) - (lse * LOG2_E)[..., None])
    p = torch.where(seen, p, 0.0)
    ds = p * (chain(grad_out, v) - delta[..., None])
    p, ds = p.to(narrow), ds.to(narrow)
    grad_q = chain(ds, k.transpose(-1, -2)) * fp32(scale)
    grad_k = torch.zeros(heads // group, keys, q.shape[2], device=q.device)
    grad_v = torch.zeros_like(grad_k)
    for h in range(group):  # one accumulator runs through the heads of a group
        of = slice(h, None, group)
        grad_k = chain(ds[of].transpose(-1, -2), q[of].transpose(-1, -2), grad_k)
        grad_v = chain(p[of].transpose(-1, -2), grad_out[of].transpose(-1, -2), grad_v)
    return grad_q, grad_k * fp32(scale), grad_v
