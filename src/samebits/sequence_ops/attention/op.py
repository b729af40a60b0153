"""The torch operators ``samebits::attention`` and ``attention_backward``: checks, choice of backend, fake results, autograd.

They are opaque to a compiler, as all operators of this package are. A row of attention depends on other rows, so the
declaration of ``samebits.contract`` does not describe it; what follows there from a declaration is written out here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from samebits import dispatch
from samebits.autograd import refuse_second_derivative
from samebits.contract import BackendSpec
from samebits.dispatch import UnsupportedError
from samebits.operator import LIBRARY, announce
from samebits.runtime import device as devices
from samebits.sequence_ops.attention import contracts, hopper, reference
from samebits.sequence_ops.attention.checks import Problem, check, check_bounds, check_gradient

BACKENDS = (BackendSpec("cuda", min_arch=90), BackendSpec("triton", min_arch=80), BackendSpec("reference"))
FEW_QUERIES = 64
"""Up to these a tile of the CUDA kernels would mostly be empty, and the other backend's is smaller."""
_told: set[tuple[str, ...]] = set()
Plan = TypeVar("Plan")

_OPTIONS = "Tensor? cu_seqlens, Tensor? cu_seqlens_k, bool causal, float scale, str contract, str? backend"
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool[] wanted) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def choose(device: torch.device, asked: str | None, no_cuda: str | None) -> str:
    """The backend that runs a call there. UnsupportedError: the asked one cannot, or the policy forbids what is left.

    ``no_cuda``: why the CUDA kernels do not take this call, or None.
    """
    names = [str(backend.name) for backend in BACKENDS]
    if asked is not None and asked not in names:
        known = ", ".join(map(repr, names))
        raise UnsupportedError(f"{contracts.NAME} has no backend named {asked!r}; choose one of {known}")
    why: dict[str, str] = {}
    for backend in BACKENDS[:-1]:
        found = dispatch.unable(backend, devices.info(device), devices.missing(backend.name))
        if found is None and backend.name == "cuda" and no_cuda is not None:
            found = f"the CUDA kernels do not take this call: {no_cuda}"
        if found is None and asked in (None, backend.name):
            return str(backend.name)
        if found is not None and asked == backend.name:
            raise UnsupportedError(f"{contracts.NAME}: {found}")
        why[backend.name] = found or ""
    if asked is None and device.type == "cuda":
        reason = why["triton"]
        announce(contracts.NAME, [((reason,), f"running on the slower backend 'reference': {reason}")], _told)
    return "reference"


def _choose(problem: Problem, asked: str | None, q: Tensor, k: Tensor, *others: Tensor) -> str:
    """The CUDA kernels where they are faster, and can; where they cannot because of how the tensors lie, that is said."""
    if asked not in (None, "cuda"):
        return choose(q.device, asked, None)
    arch = devices.info(q.device).arch
    no_cuda = hopper.unsuited(arch, problem.packed, q, k, *others)
    if asked is None and arch == hopper.ARCH:
        if problem.queries <= FEW_QUERIES:
            no_cuda = "few queries"
        elif no_cuda is not None and k.numel() and not problem.packed:
            announce(contracts.NAME, [((no_cuda,), f"running on the slower backend 'triton': {no_cuda}")], _told)
    return choose(q.device, asked, no_cuda)


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
    chosen = _choose(problem, backend, q, k, v)
    factor = contracts.fp32(scale)
    if chosen == "reference":
        return reference.forward(problem, recipe, q, k, v, cu_q, cu_k, causal, factor)
    with torch.cuda.device(q.device):
        if chosen == "cuda":
            from samebits.sequence_ops.attention import cuda

            best = cuda.plans(recipe, problem.head_dim, causal, problem.queries)
            return cuda.forward(problem, recipe, _picked(best), q, k, v, causal, factor)
        from samebits.sequence_ops.attention import triton

        plan = _picked(triton.plans(problem, devices.info(q.device).arch))
        return triton.forward(problem, recipe, plan, q, k, v, cu_q, cu_k, causal, factor)


def _picked(plans: tuple[Plan, ...]) -> Plan:
    """The best, or what ``samebits.force_plan`` asks for."""
    return plans[dispatch.forced_plan() % len(plans)]


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
    tensors = (q, k, v, out, lse, grad_out)
    chosen = _choose(problem, backend, q, k, v, grad_out)
    factor = contracts.fp32(scale)
    by = (wanted[0], wanted[1] or wanted[2])
    if chosen == "reference":
        results = reference.backward(problem, *tensors, cu_q, cu_k, causal, factor)
    else:
        with torch.cuda.device(q.device):
            if chosen == "cuda":
                from samebits.sequence_ops.attention import cuda_backward

                results = cuda_backward.backward(problem, _picked(cuda_backward.plans()), *tensors, causal, factor, by)
            else:
                from samebits.sequence_ops.attention import triton_backward

                plan = _picked(triton_backward.plans(problem.head_dim, causal, devices.info(q.device).arch))
                results = triton_backward.backward(problem, plan, *tensors, cu_q, cu_k, causal, factor, by)
    grad_q, grad_k, grad_v = (r if want else r.new_empty(0) for r, want in zip(results, wanted, strict=True))
    return grad_q, grad_k, grad_v


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
