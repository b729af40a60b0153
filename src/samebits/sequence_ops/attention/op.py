"""The torch operators ``samebits::attention`` and ``attention_backward``: checks, choice of backend, fake results, autograd.

They are opaque to a compiler, as all operators of this package are. A row of attention depends on other rows, so the
declaration of ``samebits.contract`` does not describe it; what follows there from a declaration is written out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits import observers
from samebits.autograd import refuse_second_derivative
from samebits.operator import LIBRARY, announce
from samebits.runtime import device as devices
from samebits.sequence_ops.attention import contracts, reference
from samebits.sequence_ops.attention.checks import Problem, check, check_bounds, check_gradient
from samebits.sequence_ops.attention.choice import Decision, decide
from samebits.sequence_ops.attention.contracts import Recipe
from samebits.sequence_ops.attention.spec import SPEC

BACKENDS = SPEC.backends
GRADIENTS = ("grad_q", "grad_k", "grad_v")
_told: set[tuple[str, ...]] = set()

_OPTIONS = "Tensor? cu_seqlens, Tensor? cu_seqlens_k, bool causal, float scale, str contract, str? backend"
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool[] wanted) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def _decide(
    problem: Problem,
    recipe: Recipe,
    backward: bool,
    causal: bool,
    asked: str | None,
    tensors: Sequence[Tensor],
    wanted: tuple[str, ...],
) -> Decision:
    """What runs the call. A slower backend that a caller could avoid is announced, or refused by the policy ``strict``."""
    info = devices.info(tensors[0].device)
    found = decide(problem, recipe, backward, causal, asked, info, tensors, wanted)
    if found.announced:
        notice = f"running on the slower backend {found.choice.backend!r}: {found.announced}"
        announce(contracts.NAME, [((found.announced,), notice)], _told)
    return found


def _prepared(
    title: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    scale: float,
    contract: str,
) -> tuple[Problem, Tensor | None, Tensor | None]:
    """The checked problem, and bounds that a kernel may follow: int64, contiguous, their values checked before any use."""
    problem = check(title, q, k, v, cu_q, cu_k, scale, contract)
    ready: list[Tensor | None] = []
    for name, bounds, total in (("cu_seqlens", cu_q, problem.queries), ("cu_seqlens_k", cu_k, problem.keys)):
        if bounds is not None:
            check_bounds(title, name, bounds, total)
            bounds = bounds.to(torch.int64).contiguous()
        ready.append(bounds)
    return problem, ready[0], ready[1]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    contract: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    problem, cu_q, cu_k = _prepared(contracts.NAME, q, k, v, cu_seqlens, cu_seqlens_k, scale, contract)
    recipe = contracts.recipe(contract)
    decision = _decide(problem, recipe, False, causal, backend, (q, k, v), ("out", "lse"))
    results = _run(decision, problem, recipe, q, k, v, cu_q, cu_k, causal, contracts.fp32(scale))
    if observers.OBSERVERS:
        observers.tell(contracts.NAME, False, (q, k, v, cu_seqlens, cu_seqlens_k), results, decision)
    return results


def _run(
    decision: Decision,
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
    plan: Any = decision.choice.plan
    if decision.choice.backend == "reference":
        return reference.forward(problem, recipe, q, k, v, cu_q, cu_k, causal, scale)
    with torch.cuda.device(q.device):
        if decision.choice.backend == "cuda":
            from samebits.sequence_ops.attention import cuda

            return cuda.forward(problem, recipe, plan, q, k, v, causal, scale)
        from samebits.sequence_ops.attention import triton

        return triton.forward(problem, recipe, plan, q, k, v, cu_q, cu_k, causal, scale)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    contract: str,
    backend: str | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    title = f"{contracts.NAME}_backward"
    problem, cu_q, cu_k = _prepared(title, q, k, v, cu_seqlens, cu_seqlens_k, scale, contract)
    check_gradient(title, q, out, lse, grad_out)
    _check_wanted(title, wanted)
    grad_out, out, lse = grad_out.contiguous(), out.contiguous(), lse.contiguous()
    names = tuple(name for name, want in zip(GRADIENTS, wanted, strict=True) if want)
    decision = _decide(problem, contracts.recipe(contract), True, causal, backend, (q, k, v, grad_out), names)
    tensors = (q, k, v, out, lse, grad_out)
    made = _run_backward(decision, problem, tensors, cu_q, cu_k, causal, contracts.fp32(scale), wanted)
    grad_q, grad_k, grad_v = (r if want else r.new_empty(0) for r, want in zip(made, wanted, strict=True))
    if observers.OBSERVERS:
        given = (grad_out, q, k, v, out, lse, cu_seqlens, cu_seqlens_k)
        observers.tell(contracts.NAME, True, given, (grad_q, grad_k, grad_v), decision)
    return grad_q, grad_k, grad_v


def _run_backward(
    decision: Decision,
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """``tensors``: q, k, v, out, lse, grad_out."""
    by = (wanted[0], wanted[1] or wanted[2])
    plan: Any = decision.choice.plan
    if decision.choice.backend == "reference":
        return reference.backward(problem, *tensors, cu_q, cu_k, causal, scale)
    with torch.cuda.device(tensors[0].device):
        if decision.choice.backend == "cuda":
            from samebits.sequence_ops.attention import cuda_backward

            return cuda_backward.backward(problem, plan, *tensors, causal, scale, by)
        from samebits.sequence_ops.attention import triton_backward

        return triton_backward.backward(problem, plan, *tensors, cu_q, cu_k, causal, scale, by)


def _check_wanted(title: str, wanted: list[bool]) -> None:
    if len(wanted) != 3:
        raise ValueError(f"{title}: wanted must have 3 entries, got {len(wanted)}")


# --- torch ------------------------------------------------------------------------------------------------------------


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, causal: bool, scale: float, contract: str, backend: Any
) -> tuple[Tensor, Tensor]:
    problem = check(contracts.NAME, q, k, v, cu_q, cu_k, scale, contract)
    lse = q.new_empty(problem.batch, problem.heads, problem.queries, dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Any,
    cu_k: Any,
    causal: bool,
    scale: float,
    contract: str,
    backend: Any,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    title = f"{contracts.NAME}_backward"
    check(title, q, k, v, cu_q, cu_k, scale, contract)
    check_gradient(title, q, out, lse, grad_out)
    _check_wanted(title, wanted)
    grad_q, grad_k, grad_v = (t.new_empty(t.shape if want else (0,)) for t, want in zip((q, k, v), wanted, strict=True))
    return grad_q, grad_k, grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor | None, _grad_lse: None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        refuse_second_derivative(contracts.NAME)
    nothing = (None,) * 9
    if grad_out is None:
        return nothing
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    results = torch.ops.samebits.attention_backward.default(
        grad_out, q, k, v, out, lse, cu_q, cu_k, *ctx.options, wanted
    )
    return (*(r if want else None for r, want in zip(results, wanted, strict=True)), *nothing[3:])


LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("samebits::attention", _fake_forward, lib=LIBRARY)
torch.library.register_fake("samebits::attention_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("samebits::attention", _gradients, setup_context=_save, lib=LIBRARY)
