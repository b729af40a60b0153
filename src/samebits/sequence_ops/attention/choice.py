"""Which backend runs a call of ``attention``, with which plan. It sees sizes, strides and the device, never a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from samebits import dispatch
from samebits.contract import BackendSpec
from samebits.dispatch import Call, Choice, DeviceInfo, UnsupportedError
from samebits.runtime import device as devices
from samebits.sequence_ops.attention import hopper
from samebits.sequence_ops.attention.checks import Problem
from samebits.sequence_ops.attention.contracts import NAME, Recipe
from samebits.sequence_ops.attention.hopper import FEW_QUERIES
from samebits.sequence_ops.attention.spec import SPEC


@dataclass(frozen=True)
class Decision:
    """A call and what was chosen for it."""

    call: Call
    choice: Choice
    announced: str = ""
    """Why a slower backend than one could expect runs it; empty where that is a matter of course."""


def decide(
    problem: Problem,
    recipe: Recipe,
    backward: bool,
    causal: bool,
    asked: str | None,
    info: DeviceInfo,
    tensors: Sequence[Tensor],
    wanted: tuple[str, ...],
) -> Decision:
    """The asked backend or nothing else; otherwise the first that takes the call. ``tensors``: q, k, v and a backward's grad_out.

    UnsupportedError: no backend has this name, or the asked one cannot.
    """
    names = [str(backend.name) for backend in SPEC.backends]
    if asked is not None and asked not in names:
        raise UnsupportedError(f"{NAME} has no backend named {asked!r}; choose one of {', '.join(map(repr, names))}")
    rejected: list[str] = []
    announced = ""
    for backend in SPEC.backends:
        if asked not in (None, backend.name):
            continue
        why = dispatch.unable(backend, info, devices.missing(backend.name) if backend.min_arch else None)
        if why is None and backend.name == "cuda":
            why, announced = _left_to_triton(problem, backward, asked, info, tensors)
        if why is None:
            break
        rejected.append(why)
    else:
        raise UnsupportedError(f"{NAME}: {'; '.join(rejected)}")
    options = plans(backend, problem, recipe, backward, causal, info.arch)
    reason = "asked for" if asked is not None else "first that accepts the call" if rejected else "preferred"
    if asked is None and backend.name == "reference" and info.kind == "cuda":
        announced = rejected[-1]
    choice = Choice(backend.name, options[dispatch.forced_plan() % len(options)], reason, tuple(rejected))
    return Decision(_call(problem, recipe, backward, info, wanted), choice, announced)


def _left_to_triton(
    problem: Problem, backward: bool, asked: str | None, info: DeviceInfo, tensors: Sequence[Tensor]
) -> tuple[str | None, str]:
    """Why the CUDA kernels do not run this call, and the part of it that a caller could change."""
    refused = "the CUDA kernels do not take this call: "
    if why := hopper.unsuited(info.arch, *tensors):
        return refused + why, ""
    few = problem.queries_each <= FEW_QUERIES and (backward or problem.group > FEW_QUERIES)
    if asked is None and few:
        return f"up to {FEW_QUERIES} queries of a sequence the tiles of the CUDA kernels would mostly be empty", ""
    why = hopper.unreadable(*tensors)
    return (None, "") if why is None else (refused + why, why)


def plans(
    backend: BackendSpec, problem: Problem, recipe: Recipe, backward: bool, causal: bool, arch: int
) -> tuple[object, ...]:
    """Every launch configuration, best first; all have the same bits."""
    if backend.name == "reference":
        return (None,)
    if backend.name == "cuda":
        from samebits.sequence_ops.attention import cuda, cuda_backward

        each = problem.queries_each
        if backward:
            return cuda_backward.plans(problem.head_dim, causal, each)
        return cuda.plans(recipe, problem.head_dim, causal, each, problem.group)
    from samebits.sequence_ops.attention import triton, triton_backward

    if backward:
        return triton_backward.plans(problem.head_dim, causal, problem.packed, arch)
    return triton.plans(problem, recipe, arch)


def _call(problem: Problem, recipe: Recipe, backward: bool, info: DeviceInfo, wanted: tuple[str, ...]) -> Call:
    sizes = {
        "B": problem.batch,
        "S_q": problem.queries,
        "S_k": problem.keys,
        "H": problem.heads,
        "H_kv": problem.kv_heads,
    }
    return Call(
        op=NAME,
        backward=backward,
        contract=recipe.contract.name,
        rows=problem.batch * problem.queries,
        sizes=(*sizes.items(), ("D", problem.head_dim)),
        layouts=(),
        wanted=wanted,
        grad_dtype="",
        device=info,
    )
