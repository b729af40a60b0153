"""The torch operators ``samebits::attention`` and ``attention_backward``: checks, choice of backend, fake results, autograd.

They are opaque to a compiler, as all operators of this package are. A row of attention depends on other rows, so the
declaration of ``samebits.contract`` does not describe it; what follows there from a declaration is written out here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits import dispatch, observers
from samebits.autograd import refuse_second_derivative
from samebits.observers import unwatched
from samebits.operator import LIBRARY, announce
from samebits.runtime import device as devices
from samebits.runtime.program import Program
from samebits.sequence_ops.attention import contracts, reference
from samebits.sequence_ops.attention.checks import Problem, check, check_bounds, check_gradient
from samebits.sequence_ops.attention.choice import Decision, decide
from samebits.sequence_ops.attention.contracts import Recipe
from samebits.sequence_ops.attention.spec import SPEC

BACKENDS = SPEC.backends
RESULTS = ("out", "lse")
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
    """What runs the call."""
    info = devices.info(tensors[0].device)
    found = decide(problem, recipe, backward, causal, asked, info, tensors, wanted)
    _announce(found)
    return found


class _Ready(NamedTuple):
    """What follows from the metadata of a call: looked up the next time, where no bounds have to be read."""

    problem: Problem
    decision: Decision
    program: Program | None = None
    """What the CUDA backend launches, where it has been written down."""


KNOWN_CALLS = 4096
_known: dict[tuple[Any, ...], _Ready] = {}


def _ready(
    title: str,
    backward: bool,
    tensors: tuple[Tensor, ...],
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    causal: bool,
    scale: float,
    contract: str,
    asked: str | None,
    wanted: tuple[str, ...],
) -> tuple[_Ready, Tensor | None, Tensor | None]:
    """The checked call, what runs it, and its bounds. ``tensors``: q, k, v; of a backward also grad_out, out, lse."""
    key: list[Any] = [backward, causal, scale, contract, asked, wanted, dispatch.forced_plan()]
    for tensor in tensors:
        if tensor.layout is torch.strided:
            key += tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16, tensor.device
    found = tuple(key)
    known = _known.get(found)
    q, k, v, *upstream = tensors
    dense = cu_seqlens[0] is None and cu_seqlens[1] is None
    if known is not None and dense:
        _announce(known.decision)
        return known, None, None
    problem, cu_q, cu_k = _prepared(title, q, k, v, *cu_seqlens, scale, contract)
    if backward:
        grad_out, out, lse = upstream
        check_gradient(title, q, out, lse, grad_out)
    read = (q, k, v, upstream[0].contiguous()) if backward else (q, k, v)
    recipe = contracts.recipe(contract)
    ready = _Ready(problem, _decide(problem, recipe, backward, causal, asked, read, wanted))
    if dense:
        if ready.decision.choice.backend == "cuda":
            program = _written_down(ready, recipe, tensors, causal, contracts.fp32(scale), wanted)
            ready = ready._replace(program=program)
        if len(_known) >= KNOWN_CALLS:
            _known.clear()
        _known[found] = ready
    return ready, cu_q, cu_k


def _written_down(
    ready: _Ready,
    recipe: Recipe,
    tensors: tuple[Tensor, ...],
    causal: bool,
    scale: float,
    wanted: tuple[str, ...],
) -> Program | None:
    """``tensors`` as :func:`_ready` has them."""
    from samebits.sequence_ops.attention import cuda, cuda_backward

    plan: Any = ready.decision.choice.plan
    q, k, v, *upstream = tensors
    if not upstream:
        return cuda.written_down(ready.problem, recipe, plan, q, k, v, causal, scale)
    grad_out, _, lse = (tensor.contiguous() for tensor in upstream)
    by = ("grad_q" in wanted, "grad_k" in wanted or "grad_v" in wanted)
    return cuda_backward.written_down(ready.problem, plan, q, k, v, lse, grad_out, causal, scale, by)


def _announce(found: Decision) -> None:
    """A slower backend that a caller could avoid: said once, or refused by the policy ``strict``."""
    if found.announced:
        notice = f"running on the slower backend {found.choice.backend!r}: {found.announced}"
        announce(contracts.NAME, [((found.announced,), notice)], _told)


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
    bounds = (cu_seqlens, cu_seqlens_k)
    ready, cu_q, cu_k = _ready(contracts.NAME, False, (q, k, v), bounds, causal, scale, contract, backend, RESULTS)
    with _on(q):
        results = _run(ready, contracts.recipe(contract), q, k, v, cu_q, cu_k, causal, contracts.fp32(scale))
    if observers.OBSERVERS:
        observers.tell(contracts.NAME, False, (q, k, v, *bounds), results, ready.decision)
    return results


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The device of a tensor, made current where it is not."""
    if not tensor.is_cuda or tensor.get_device() == devices.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


_HERE = contextlib.nullcontext()


def _run(
    ready: _Ready,
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    problem, decision, program = ready
    plan: Any = decision.choice.plan
    if decision.choice.backend == "reference":
        return reference.forward(problem, recipe, q, k, v, cu_q, cu_k, causal, scale)
    if decision.choice.backend == "cuda":
        from samebits.sequence_ops.attention import cuda

        return cuda.forward(problem, recipe, plan, q, k, v, cu_q, cu_k, causal, scale, program)
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
    _check_wanted(title, wanted)
    bounds = (cu_seqlens, cu_seqlens_k)
    names = tuple(name for name, want in zip(GRADIENTS, wanted, strict=True) if want)
    tensors = (q, k, v, grad_out, out, lse)
    ready, cu_q, cu_k = _ready(title, True, tensors, bounds, causal, scale, contract, backend, names)
    dense = (q, k, v, out.contiguous(), lse.contiguous(), grad_out.contiguous())
    with _on(q):
        made = _run_backward(ready, dense, cu_q, cu_k, causal, contracts.fp32(scale), wanted)
    grad_q, grad_k, grad_v = (r if want else r.new_empty(0) for r, want in zip(made, wanted, strict=True))
    if observers.OBSERVERS:
        given = (grad_out, q, k, v, out, lse, *bounds)
        observers.tell(contracts.NAME, True, given, (grad_q, grad_k, grad_v), ready.decision)
    return grad_q, grad_k, grad_v


def _run_backward(
    ready: _Ready,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    scale: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """``tensors``: q, k, v, out, lse, grad_out."""
    problem, decision, program = ready
    by = (wanted[0], wanted[1] or wanted[2])
    plan: Any = decision.choice.plan
    if decision.choice.backend == "reference":
        return reference.backward(problem, *tensors, cu_q, cu_k, causal, scale)
    if decision.choice.backend == "cuda":
        from samebits.sequence_ops.attention import cuda_backward

        return cuda_backward.backward(problem, plan, *tensors, cu_q, cu_k, causal, scale, by, program)
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


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Out and lse. ``arguments`` are those of the torch operator; past its dispatcher where nobody listens there."""
    tensors = arguments[:5]
    if torch.compiler.is_compiling() or not unwatched(tensors):
        results: tuple[Tensor, Tensor] = torch.ops.samebits.attention.default(*arguments)
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors[:3]):
        results = _Differentiable.apply(*arguments)
    else:
        results = _forward(*arguments)
    return results


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """All three gradients, likewise; the caller has seen to it that nobody asks for theirs."""
    if torch.compiler.is_compiling() or not unwatched(arguments[:8]):
        results: tuple[Tensor, Tensor, Tensor] = torch.ops.samebits.attention_backward.default(*arguments)
        return results
    return _backward(*arguments)


class _Differentiable(torch.autograd.Function):
    """What ``register_autograd`` makes of the functions below, for calls that do not go through the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *upstream)


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
    results = backward(grad_out, q, k, v, out, lse, cu_q, cu_k, *ctx.options, wanted)
    return (*(r if want else None for r, want in zip(results, wanted, strict=True)), *nothing[3:])


LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("samebits::attention", _fake_forward, lib=LIBRARY)
torch.library.register_fake("samebits::attention_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("samebits::attention", _gradients, setup_context=_save, lib=LIBRARY)
