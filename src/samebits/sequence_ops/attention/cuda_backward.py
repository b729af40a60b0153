"""The backward as CUDA C++ kernels for Hopper, with the bits of ``reference.py``: no atomics, every sum in one warpgroup.

``attention_grad_keys.cu`` gives grad_k and grad_v, ``attention_grad_queries.cu`` grad_q; scores are computed twice, which is the
price of the fixed order. delta is the Triton kernel's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from samebits.audit.build import Build
from samebits.checks import dtype_name
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.cuda import KINDS
from samebits.sequence_ops.attention.hopper import boxes, word
from samebits.sequence_ops.attention.triton_backward import delta_of

TILE = 128
"""Keys, or queries, that a block of two warpgroups owns."""


@dataclass(frozen=True)
class Passing:
    """How many positions pass a tile at a time, and how many such boxes are on their way. Never touches the bits."""

    rows: int
    stages: int


@dataclass(frozen=True)
class Plan:
    by_key: Passing
    by_query: Passing


def plans() -> tuple[Plan, ...]:
    """Best first."""
    return (Plan(Passing(64, 3), Passing(64, 4)), Plan(Passing(64, 2), Passing(96, 3)))


def backward(
    problem: Problem,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    causal: bool,
    scale: float,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``triton_backward.backward`` without documents. ``hopper.unsuited`` has nothing against q, k, v and ``grad_out``."""
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    numbers = (lse, delta_of(problem, out, grad_out, lse))
    words = map(word, (contracts.exponent_scale(scale), scale, contracts.LOG2_E))
    tail = (problem.queries, problem.keys, problem.heads, problem.group, *words)
    kind = (problem.head_dim, causal, dtype_name(q.dtype))
    if wanted[1]:
        grid = (problem.batch * -(-problem.keys // TILE), problem.kv_heads)
        maps = _maps(plan.by_key.rows, TILE, q, k, v, grad_out)
        prepared = _launch("attention_grad_keys", plan.by_key, *kind, grid)
        launch(prepared, *maps, *numbers, grad_k, grad_v, *tail)
    if wanted[0]:
        grid = (problem.batch * -(-problem.queries // TILE), problem.heads)
        maps = _maps(TILE, plan.by_query.rows, q, k, v, grad_out)
        prepared = _launch("attention_grad_queries", plan.by_query, *kind, grid)
        launch(prepared, *maps, *numbers, grad_q, *tail)
    return grad_q, grad_k, grad_v


def _maps(queries: int, keys: int, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[object, ...]:
    return boxes(q, queries), boxes(k, keys), boxes(v, keys), boxes(grad_out, queries)


@functools.lru_cache(maxsize=4096)
def _launch(entry: str, passing: Passing, head_dim: int, causal: bool, dtype: str, grid: tuple[int, int]) -> Launch:
    rows = 2 * (TILE + passing.stages * passing.rows)
    numbers = 8 * passing.rows * passing.stages if entry == "attention_grad_keys" else 0  # lse and delta of each query
    shared = 1024 + 2 * head_dim * rows + numbers + 8 * (1 + 2 * passing.stages)  # from a multiple of 1024 on
    return Launch(_kernel(entry, passing, head_dim, causal, dtype), grid, 3 * 128, shared)


def _kernel(entry: str, passing: Passing, head_dim: int, causal: bool, dtype: str) -> CudaKernel:
    defines = {
        "D": head_dim,
        "CAUSAL": int(causal),
        "ELEMENT": ELEMENTS[dtype],
        "ROWS" if entry == "attention_grad_keys" else "KEYS": passing.rows,
        "STAGES": passing.stages,
    }
    return CudaKernel(contracts.NAME, entry, tuple(sorted(defines.items())))


# --- audit ------------------------------------------------------------------------------------------------------------


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return tuple(_builds())


def _builds() -> Iterator[Build]:
    for plan in plans():
        for entry, passing in (("attention_grad_keys", plan.by_key), ("attention_grad_queries", plan.by_query)):
            for causal, head_dim, dtype in KINDS:
                yield Build(_kernel(entry, passing, head_dim, causal, dtype), tuple(contracts.RECIPES))
