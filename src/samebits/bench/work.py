"""Everything that is timed, as a prepared call without arguments: candidates through our torch ops, peers through autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.bench.case import Case, gradient_dtype
from samebits.bench.peers import Peer
from samebits.checks import DTYPES
from samebits.operator import Operator

Run = Callable[[], tuple[Tensor, ...]]


class LeftOut(Exception):
    """Raised by ``prepare``: this work is not timed, for the reason given."""


@dataclass(frozen=True)
class Work:
    """``prepare`` does what must not be timed (a forward, a compilation) and returns the call that is timed.

    It runs on the stream that will be captured, because autograd runs a backward on the stream of its forward.
    """

    name: str
    prepare: Callable[[], Run]
    keep: bool = False
    """Keep the timed call's own results: their bits are checked."""


@dataclass(frozen=True)
class Given:
    """The tensors of one measurement."""

    inputs: dict[str, Tensor]
    upstream: dict[str, Tensor]


def default_scalars(op: Operator) -> dict[str, Any]:
    return {scalar.name: scalar.default for scalar in op.spec.scalars}


def candidate(op: Operator, case: Case, given: Given, contract: str, backend: str) -> Work:
    """Our operator. Forward and backward go through the torch ops; both together through autograd, as in training."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return op.forward(*given.inputs.values(), contract=contract, backend=backend)

    def prepare() -> Run:
        if case.direction == "fwd":
            return forward
        if case.direction == "bwd":
            tensors = backward_tensors(op, given, forward())
            dtype = DTYPES[gradient_dtype(op.spec, case)]

            def backward() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    results = op.backward(*tensors, contract=contract, backend=backend, grad_dtype=dtype)
                return tuple(result for result in results if result is not None)

            return backward
        leaves = _leaves(op, given.inputs)

        def both() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                results = op.forward(*leaves.values(), contract=contract, backend=backend)
                public = [
                    r for r, declared in zip(results, op.spec.forward.results, strict=True) if not declared.hidden
                ]
            grads = torch.autograd.grad(public, _wanted(op, leaves), _upstream(op, given))
            return (*(result.detach() for result in results), *grads)

        return both

    return Work(f"{contract}/{backend}", prepare, keep=True)


def peer(op: Operator, case: Case, given: Given, other: Peer) -> Work:
    """Somebody else's implementation, timed in the same three ways, as far as it has them."""
    scalars = default_scalars(op)
    casts = dict(other.cast)
    shown, learned = other.results(op.spec), other.leaves(op.spec)

    def prepare() -> Run:
        device = next(iter(given.inputs.values())).device
        reason = other.unavailable(device.type)
        if reason is None and case.direction != "fwd" and not learned:
            reason = "it has a forward alone"
        if reason is not None:
            raise LeftOut(reason)
        own = {arg.name for arg in op.spec.forward.inputs if not arg.derived}
        inputs = {n: t.to(DTYPES[casts[n]]) if n in casts else t for n, t in given.inputs.items() if n in own}
        leaves = {name: t.detach().requires_grad_(name in learned) for name, t in inputs.items()}
        wanted = [leaves[name] for name in learned]
        grads = [given.upstream[f"grad_{name}"] for name in shown if case.direction != "fwd"]
        arguments = (*leaves.values(), *scalars.values())
        return through_autograd(
            other.name, other.run, arguments, wanted, grads, case.direction, other.compiled
        ).prepare()

    return Work(other.name, prepare)


def through_autograd(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    leaves: Sequence[Tensor],
    upstream: Sequence[Tensor],
    direction: str,
    compile_it: bool = False,
) -> Work:
    """Any function of tensors, a tensor or a tuple of them, forward, backward or both; compiled late, so that a compiler that is
    missing fails this work alone."""

    def prepare() -> Run:
        made = compiled(function) if compile_it else function

        def call() -> tuple[Tensor, ...]:
            found = made(*arguments)
            return (found,) if isinstance(found, Tensor) else tuple(found)

        if direction == "fwd":

            def forward() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return call()

            return forward
        if direction == "bwd":
            with reusable_graph(), torch.enable_grad():
                results = call()
                torch.autograd.grad(
                    results, leaves, upstream, retain_graph=True
                )  # compiles the backward, if that is lazy
            return lambda: torch.autograd.grad(results, leaves, upstream, retain_graph=True)

        def both() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                results = call()
            return (*(r.detach() for r in results), *torch.autograd.grad(results, leaves, upstream))

        return both

    return Work(name, prepare)


def device_copy(name: str, device: torch.device, moved: int) -> Work:
    """A copy that reads and writes ``moved`` bytes in total.

    An elementwise kernel (negation) rather than ``copy_``: a captured ``copy_`` becomes a copy node, which on an H200
    reaches 2.7 TB/s where a kernel reaches 4.2.
    """

    def prepare() -> Run:
        source = torch.randint(-(2**31), 2**31 - 1, (max(moved // 8, 1),), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        return lambda: (torch.neg(source, out=target),)

    return Work(name, prepare)


def backward_tensors(op: Operator, given: Given, results: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The inputs of the explicit backward, in order; saved tensors come from the forward's own results."""
    saved = {declared.name: r for declared, r in zip(op.spec.forward.results, results, strict=True)}
    known = given.inputs | saved | given.upstream
    return [known.get(arg.name) for arg in op.spec.backward.inputs]


def _leaves(op: Operator, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    learned = {r.name.removeprefix("grad_") for r in op.spec.backward.results}
    return {name: t.detach().requires_grad_(name in learned) for name, t in inputs.items()}


def _wanted(op: Operator, leaves: dict[str, Tensor]) -> list[Tensor]:
    return [leaves[r.name.removeprefix("grad_")] for r in op.spec.backward.results]


def _upstream(op: Operator, given: Given) -> list[Tensor]:
    """One gradient per public result, in the order of the results."""
    return [given.upstream[f"grad_{r.name}"] for r in op.spec.forward.results if not r.hidden]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Specialised to the shape at hand. The reset keeps a long sweep from reaching the limit where dynamo gives up silently."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


@contextlib.contextmanager
def reusable_graph() -> Iterator[None]:
    """A compiled backward normally overwrites what its forward saved; here one forward serves many backwards."""
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        yield
