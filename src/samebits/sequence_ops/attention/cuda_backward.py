"""The backward as CUDA C++ kernels for Hopper, with the bits of ``reference.py``: no atomics, every sum in one warpgroup.

``attention_grad_keys.cu`` gives grad_k and grad_v, ``attention_grad_queries.cu`` grad_q; scores are computed twice, which is the
price of the fixed order. delta is the Triton kernel's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from samebits.audit.build import Build
from samebits.checks import dtype_name
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.program import Program, dense, form_of, recorded
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.cuda import KINDS
from samebits.sequence_ops.attention.hopper import bounds_of, boxes, word
from samebits.sequence_ops.attention.triton_backward import delta_of


@dataclass(frozen=True)
class Passing:
    """How many positions pass a tile at a time, how many such boxes are on their way, and the warpgroups that multiply, each of
    which owns 64 positions of the tile. Never touches the bits."""

    rows: int
    stages: int
    groups: int = 2

    @property
    def tile(self) -> int:
        return 64 * self.groups


@dataclass(frozen=True)
class Plan:
    by_key: Passing
    by_query: Passing


SMALL, LARGE = Plan(Passing(64, 3), Passing(64, 4)), Plan(Passing(80, 3), Passing(64, 4, 3))
LARGE_FROM = {False: 4608, True: 3072}
"""Queries of a sequence, causal or not, from which that one is faster at a head_dim of 128, by measurement. At 64 it is not."""


def plans(head_dim: int, causal: bool, queries: int) -> tuple[Plan, ...]:
    """Best first, for so many queries of a sequence."""
    return (LARGE, SMALL) if head_dim == 128 and queries >= LARGE_FROM[causal] else (SMALL, LARGE)


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
    program: Program | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``triton_backward.backward``. ``hopper.unsuited`` has nothing against q, k, v and ``grad_out``.

    ``program``: what :func:`written_down` made of calls with this metadata.
    """
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    tensors = (q, k, v, grad_out, lse, delta_of(problem, out, grad_out, lse), grad_q, grad_k, grad_v)
    if program is not None:
        program.run([tensor.data_ptr() for tensor in tensors], q.device)
    else:
        _enqueue(problem, plan, tensors, cu_q, cu_k, causal, scale, wanted)
    return grad_q, grad_k, grad_v


def written_down(
    problem: Problem,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    causal: bool,
    scale: float,
    wanted: tuple[bool, bool],
) -> Program | None:
    """What :func:`backward` launches behind the sums of ``delta``, for tensors with the metadata of these, without documents."""
    gradients = (dense(tensor.shape, tensor.dtype) for tensor in (q, k, v))
    forms = (*map(form_of, (q, k, v, grad_out, lse, lse)), *gradients)
    return recorded(lambda made: _enqueue(problem, plan, made, None, None, causal, scale, wanted), forms)


def _enqueue(
    problem: Problem,
    plan: Plan,
    tensors: Sequence[Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
    wanted: tuple[bool, bool],
) -> None:
    """``tensors``: q, k, v, grad_out, lse, delta, grad_q, grad_k, grad_v."""
    q, k, v, grad_out, *numbers, grad_q, grad_k, grad_v = tensors
    words = map(word, (contracts.exponent_scale(scale), scale, contracts.LOG2_E))
    by_query, by_key = bounds_of(problem, cu_q, cu_k)
    tail = (problem.documents, problem.queries, problem.keys, problem.heads, problem.group, *words)
    kind = (problem.head_dim, causal, dtype_name(q.dtype), problem.packed)
    if wanted[1]:
        grid = (problem.programs(problem.keys, plan.by_key.tile), problem.kv_heads)
        maps = _maps(plan.by_key.rows, plan.by_key.tile, q, k, v, grad_out)
        prepared = _launch("attention_grad_keys", plan.by_key, *kind, grid)
        launch(prepared, *maps, *numbers, grad_k, grad_v, by_query, by_key, *tail)
    if wanted[0]:
        grid = (problem.programs(problem.queries, plan.by_query.tile), problem.heads)
        maps = _maps(plan.by_query.tile, plan.by_query.rows, q, k, v, grad_out)
        prepared = _launch("attention_grad_queries", plan.by_query, *kind, grid)
        launch(prepared, *maps, *numbers, grad_q, by_query, by_key, *tail)


def _maps(queries: int, keys: int, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[object, ...]:
    return boxes(q, queries), boxes(k, keys), boxes(v, keys), boxes(grad_out, queries)


@functools.lru_cache(maxsize=4096)
def _launch(
    entry: str, passing: Passing, head_dim: int, causal: bool, dtype: str, packed: bool, grid: tuple[int, int]
) -> Launch:
    rows = 2 * (passing.tile + passing.stages * passing.rows)
    numbers = 8 * passing.rows * passing.stages if entry == "attention_grad_keys" else 0  # lse and delta of each query
    shared = 1024 + 2 * head_dim * rows + numbers + 8 * (2 + 2 * passing.stages)  # from a multiple of 1024 on
    return Launch(_kernel(entry, passing, head_dim, causal, dtype, packed), grid, 128 * (passing.groups + 1), shared)


def _kernel(entry: str, passing: Passing, head_dim: int, causal: bool, dtype: str, packed: bool) -> CudaKernel:
    defines = {
        "D": head_dim,
        "CAUSAL": int(causal),
        "PACKED": int(packed),
        "ELEMENT": ELEMENTS[dtype],
        "STAGES": passing.stages,
    }
    if entry == "attention_grad_keys":
        defines["ROWS"] = passing.rows
    else:
        defines |= {"KEYS": passing.rows, "GROUPS": passing.groups}
    return CudaKernel(contracts.NAME, entry, tuple(sorted(defines.items())))


# --- audit ------------------------------------------------------------------------------------------------------------


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return tuple(_builds())


def _builds() -> Iterator[Build]:
    for plan in (SMALL, LARGE):
        for entry, passing in (("attention_grad_keys", plan.by_key), ("attention_grad_queries", plan.by_query)):
            for kind in KINDS:
                yield Build(_kernel(entry, passing, *kind), tuple(contracts.RECIPES))
