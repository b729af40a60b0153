"""The forward as a CUDA C++ kernel for Hopper, with the bits of ``reference.py``: launches of ``attention_forward.cu``.

It reads q, k and v by tensor maps, so it refuses what the copy engine cannot read; ``triton.py`` takes those calls, with the
same bits. The tile and the stages move work, never an addition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.audit.build import Build
from samebits.checks import dtype_name
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.contracts import Recipe
from samebits.sequence_ops.attention.hopper import boxes, wide_word

MANY_QUERIES = 8192
"""From these on the larger tile of three warpgroups is faster."""


@dataclass(frozen=True)
class Plan:
    """Warpgroups that multiply, 64 queries each, and blocks of keys and of values on their way. Never touches the bits."""

    groups: int
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)


def plans(recipe: Recipe, head_dim: int, causal: bool, queries: int) -> tuple[Plan, ...]:
    """Best first. Three warpgroups only where that was measured."""
    two, three = (Plan(groups, 256 // recipe.kv_block) for groups in (2, 3))
    if causal or head_dim != 128:
        return (two,)
    return (three, two) if queries >= MANY_QUERIES else (two, three)


def forward(
    problem: Problem,
    recipe: Recipe,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As ``reference.forward`` without documents, on torch's current stream. ``hopper.unsuited`` has nothing against q, k and v."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(problem.batch, problem.heads, problem.queries, dtype=torch.float32)
    maps = (boxes(q, plan.rows), boxes(k, recipe.kv_block), boxes(v, recipe.kv_block))
    sizes = (problem.queries, problem.keys, problem.heads, problem.group)
    numbers = map(wide_word, (contracts.exponent_scale(scale), scale, contracts.LN_2))
    programs = problem.batch * -(-problem.queries // plan.rows)
    prepared = _launch(recipe, plan, problem.head_dim, causal, dtype_name(q.dtype), programs, problem.heads)
    launch(prepared, *maps, out, lse, *sizes, *numbers)
    return out, lse


@functools.lru_cache(maxsize=4096)
def _launch(recipe: Recipe, plan: Plan, head_dim: int, causal: bool, dtype: str, programs: int, heads: int) -> Launch:
    rows = plan.rows + 2 * plan.stages * recipe.kv_block
    shared = 1024 + 2 * head_dim * rows + 8 * (1 + 4 * plan.stages)  # from a multiple of 1024 on; a barrier is 8 bytes
    return Launch(_kernel(recipe, plan, head_dim, causal, dtype), (programs, heads), plan.threads, shared)


def _kernel(recipe: Recipe, plan: Plan, head_dim: int, causal: bool, dtype: str) -> CudaKernel:
    defines = {
        "D": head_dim,
        "KEYS": recipe.kv_block,
        "FA2": int(recipe.last_block_first),
        "CAUSAL": int(causal),
        "ELEMENT": ELEMENTS[dtype],
        "GROUPS": plan.groups,
        "STAGES": plan.stages,
    }
    return CudaKernel(contracts.NAME, "attention_forward", tuple(sorted(defines.items())))


# --- audit ------------------------------------------------------------------------------------------------------------


KINDS = tuple(itertools.product((False, True), contracts.HEAD_DIMS, contracts.DTYPES))
"""Causal, head_dim, dtype: what a kernel is specialised by, beside its plan and the contract."""


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return tuple(_builds())


def _builds() -> Iterator[Build]:
    for recipe in contracts.RECIPES.values():
        for causal, head_dim, dtype in KINDS:
            for plan in plans(recipe, head_dim, causal, 1):
                yield Build(_kernel(recipe, plan, head_dim, causal, dtype), (recipe.contract.name,))
