"""The forward as a CUDA C++ kernel for Hopper, with the bits of ``reference.py``: launches of ``attention_forward.cu``.

It reads q, k and v by tensor maps, so it refuses what the copy engine cannot read; ``triton.py`` takes those calls, with the
same bits. The tile and the stages move work, never an addition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.audit.build import Build
from samebits.checks import dtype_name
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.program import Program, dense, form_of, recorded
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.contracts import Recipe
from samebits.sequence_ops.attention.hopper import FEW_QUERIES, bounds_of, boxes, boxes_of_heads, wide_word

MANY_QUERIES = 8192
"""From these on the larger tile of three warpgroups is faster."""


@dataclass(frozen=True)
class Plan:
    """Warpgroups that multiply, 64 rows each, and blocks of keys and of values on their way. Never touches the bits.

    A row is a query of one head; with one warpgroup those of all heads of a group are in a tile, so that few queries fill it.
    """

    groups: int
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def heads(self, group: int) -> int:
        """Query heads of a tile, of ``group`` that share their keys."""
        return group if self.groups == 1 else 1

    def queries(self, group: int) -> int:
        return self.rows // self.heads(group)


def plans(recipe: Recipe, head_dim: int, causal: bool, queries: int, group: int) -> tuple[Plan, ...]:
    """Best first, for so many queries of a sequence. Three warpgroups only where that was measured."""
    block = recipe.kv_block(head_dim)
    two, three = (Plan(groups, 256 // block) for groups in (2, 3))
    large = (two,) if causal or head_dim != 128 else (three, two) if queries >= MANY_QUERIES else (two, three)
    few = (Plan(1, 384 // block),) if group <= FEW_QUERIES else ()
    return few + large if queries <= FEW_QUERIES else large + few


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
    program: Program | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``, on torch's current stream. ``hopper.unsuited`` has nothing against q, k and v.

    ``program``: what :func:`written_down` made of calls with this metadata.
    """
    out = q.new_empty(q.shape)
    lse = q.new_empty((problem.batch, problem.heads, problem.queries), dtype=torch.float32)
    if program is not None:
        program.run([q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()], q.device)
    else:
        _enqueue(problem, recipe, plan, (q, k, v, out, lse), cu_q, cu_k, causal, scale)
    return out, lse


def written_down(
    problem: Problem, recipe: Recipe, plan: Plan, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> Program | None:
    """What :func:`forward` launches for tensors with the metadata of these, without documents."""
    lse = dense((problem.batch, problem.heads, problem.queries), torch.float32)
    forms = (*map(form_of, (q, k, v)), dense(q.shape, q.dtype), lse)
    return recorded(lambda made: _enqueue(problem, recipe, plan, made, None, None, causal, scale), forms)


def _enqueue(
    problem: Problem,
    recipe: Recipe,
    plan: Plan,
    tensors: Sequence[Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """``tensors``: q, k, v, out, lse."""
    q, k, v, out, lse = tensors
    heads, queries = plan.heads(problem.group), plan.queries(problem.group)
    q_map = boxes(q, plan.rows) if plan.groups > 1 else boxes_of_heads(q, queries, heads)
    maps = (q_map, *(boxes(t, recipe.kv_block(problem.head_dim)) for t in (k, v)))
    sizes = (problem.queries, problem.keys, problem.heads, problem.group)
    bounds = bounds_of(problem, cu_q, cu_k)
    numbers = map(wide_word, (contracts.exponent_scale(scale), scale, contracts.LN_2))
    kind = (problem.head_dim, causal, dtype_name(q.dtype), problem.packed)
    prepared = _launch(recipe, plan, *kind, (problem.programs(problem.queries, queries), problem.heads // heads))
    launch(prepared, *maps, out, lse, *bounds, problem.documents, *sizes, *numbers)


@functools.lru_cache(maxsize=4096)
def _launch(
    recipe: Recipe, plan: Plan, head_dim: int, causal: bool, dtype: str, packed: bool, grid: tuple[int, int]
) -> Launch:
    rows = plan.rows + 2 * plan.stages * recipe.kv_block(head_dim)
    shared = 1024 + 2 * head_dim * rows + 8 * (2 + 4 * plan.stages)  # from a multiple of 1024 on; a barrier is 8 bytes
    return Launch(_kernel(recipe, plan, head_dim, causal, dtype, packed), grid, plan.threads, shared)


def _kernel(recipe: Recipe, plan: Plan, head_dim: int, causal: bool, dtype: str, packed: bool) -> CudaKernel:
    defines = {
        "D": head_dim,
        "KEYS": recipe.kv_block(head_dim),
        "FA2": int(recipe.last_block_first),
        "CAUSAL": int(causal),
        "PACKED": int(packed),
        "ELEMENT": ELEMENTS[dtype],
        "GROUPS": plan.groups,
        "STAGES": plan.stages,
    }
    return CudaKernel(contracts.NAME, "attention_forward", tuple(sorted(defines.items())))


# --- audit ------------------------------------------------------------------------------------------------------------


KINDS = tuple(itertools.product(contracts.HEAD_DIMS, (False, True), contracts.DTYPES, (False, True)))
"""head_dim, causal, dtype, packed: what a kernel is specialised by, beside its plan and the contract."""


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return tuple(_builds())


def _builds() -> Iterator[Build]:
    for recipe in contracts.RECIPES.values():
        for kind in KINDS:
            for plan in plans(recipe, kind[0], kind[1], 1, 1):
                yield Build(_kernel(recipe, plan, *kind), (recipe.contract.name,))
