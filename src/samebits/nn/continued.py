"""A differentiable call of an operator that also takes the optional inputs of its backward.

Two things that the operator's own autograd cannot do, because they cross the border of one call: a fold over the rows
that continues a :class:`~samebits.nn.chain.GradientChain` (``start_<p>``), and a further leg of a row gradient that
belongs to another operator (``grad_streams``, through a carrier).

A *carrier* is an output that nobody reads: a tensor without memory (every stride 0), as large as the streams. The other
operator takes it as an input and gives the leg's upstream gradient back as "its gradient"; so autograd itself brings
that gradient here, in the right order and only if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.autograd import as_tuple, refuse_second_derivative, refuse_tangents
from samebits.checks import DTYPES
from samebits.nn.chain import Bound, bind
from samebits.nn.gain import expand_gain
from samebits.operator import LIBRARY, Operator, schema


class Continued:
    """``carries``: the optional backward input that a carrier brings, and the forward input it is shaped like.

    ``segments``: how the input ``gain`` may be given as a scale of so many elements instead.
    """

    def __init__(
        self,
        operator: Operator,
        *,
        carries: tuple[str, str] | None = None,
        segments: tuple[int, ...] = (),
    ) -> None:
        self.operator = operator
        self.carries = carries
        self.segments = segments
        spec = operator.spec
        self.inputs = [arg.name for arg in spec.forward.inputs]
        self.parameters = [arg.name for arg in spec.forward.inputs if not arg.rows]
        self.visible = [index for index, result in enumerate(spec.forward.results) if not result.hidden]
        self._function = _function(self)
        self._opened = self._register() if carries else None

    def __call__(
        self, tensors: Sequence[Tensor], contract: str, backend: str | None, **scalars: Any
    ) -> tuple[Tensor, ...]:
        """The public results, then the carrier, if there is one and autograd has a use for it."""
        op = self.operator
        op._need_tensors(op.spec.forward.inputs, tuple(tensors))
        given = dict(zip(self.inputs, tensors, strict=True))
        bound = bind({name: given[name] for name in self.parameters})
        if self.segments and tuple(given["gain"].shape) == (len(self.segments),):
            if "gain" in bound:
                chain, scale = bound["gain"]
                chain.expands(scale, self.segments)
            given["gain"] = expand_gain(given["gain"], self.segments)
        inputs = tuple(given.values())
        if torch.compiler.is_compiling() and self._opened is not None:
            return as_tuple(self._opened(*inputs, *op._scalar_values(scalars), contract, backend))
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs) and (self.carries or bound):
            refuse_tangents(op.name, inputs)
            return as_tuple(self._function.apply(bound, *inputs, *op._scalar_values(scalars), contract, backend))
        return self._public(op.forward(*inputs, contract=contract, backend=backend, **scalars))

    def carrier(self, tensors: Sequence[Tensor]) -> Tensor:
        assert self.carries is not None
        like = tensors[self.inputs.index(self.carries[1])]
        return like.new_empty_strided(like.shape, [0] * like.dim())

    def _public(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(results[index] for index in self.visible)

    # --- the same as a torch op, which is what a compiler sees ------------------------------------------------------

    def _register(self) -> Any:
        op, name = self.operator, f"{self.operator.name}_open"
        arguments = schema(op.spec, backward=False).partition(" -> ")[0]
        count = len(op.spec.forward.inputs)
        LIBRARY.define(f"{name}{arguments} -> ({', '.join(['Tensor'] * (len(self.visible) + 1))})")

        def plain(*args: Any) -> tuple[Tensor, ...]:
            return (*self._public(op.below_autograd(False, *args)), self.carrier(args[:count]))

        def autograd(*args: Any) -> tuple[Tensor, ...]:
            refuse_tangents(op.name, args[:count])
            if torch.is_grad_enabled() and any(t.requires_grad for t in args[:count]):
                return self._function.apply({}, *args)
            with torch._C._AutoDispatchBelowAutograd():
                return opened(*args)

        LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
        LIBRARY.impl(name, autograd, "Autograd")
        torch.library.register_fake(f"samebits::{name}", plain, lib=LIBRARY)
        opened = getattr(torch.ops.samebits, name).default
        return opened


def _function(call: Continued) -> type[torch.autograd.Function]:
    op, spec = call.operator, call.operator.spec
    forward_results = [result.name for result in spec.forward.results]
    visible = [forward_results[index] for index in call.visible]
    saved = [arg.name for arg in spec.backward.inputs if arg.name in (*call.inputs, *forward_results)]
    leaves = (spec.forward.input(r.name.removeprefix("grad_")) for r in spec.backward.results if r.dtype == "grad")
    grad_dtype = next(leaf.dtypes[0] for leaf in leaves)

    def forward(ctx: Any, bound: Bound, *args: Any) -> tuple[Tensor, ...]:
        results = op.below_autograd(False, *args)
        known = dict(zip(call.inputs, args, strict=False)) | dict(zip(forward_results, results, strict=True))
        ctx.save_for_backward(*(known[name] for name in saved))
        ctx.bound = bound
        ctx.rest = args[len(call.inputs) :]
        ctx.shapes = {name: result.shape for name, result in zip(forward_results, results, strict=True)}
        ctx.set_materialize_grads(False)
        public = call._public(results)
        return (*public, call.carrier(args)) if call.carries else public

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative(spec.name)
        known: dict[str, Tensor | None] = dict(zip(saved, ctx.saved_tensors, strict=True))
        known |= {f"grad_{name}": grad for name, grad in zip(visible, upstream, strict=False)}
        if call.carries:
            known[call.carries[0]] = upstream[-1]
        needed = dict(zip(call.inputs, ctx.needs_input_grad[1:], strict=False))
        mask = [needed[result.name.removeprefix("grad_")] for result in spec.backward.results]
        chained = {name: slot for name, slot in ctx.bound.items() if needed[name]}
        for name, (chain, parameter) in chained.items():
            chain_rows = spec.contract(ctx.rest[-2]).chain_rows
            rows = ctx.shapes[visible[0]][: -len(spec.forward.result(visible[0]).axes)].numel()
            known[f"start_{name}"] = chain.continue_with(parameter, rows, chain_rows)
        tensors: list[Tensor | None] = []
        for arg in spec.backward.inputs:
            tensor = known.get(arg.name)
            if tensor is None and not arg.optional:
                declared = spec.forward.result(arg.name.removeprefix("grad_"))
                like = next(t for t in known.values() if t is not None)
                tensor = like.new_zeros(ctx.shapes[declared.name], dtype=DTYPES[declared.dtype])
            tensors.append(tensor)
        results = op.below_autograd(True, *tensors, *ctx.rest, grad_dtype, mask)
        by_name: dict[str, Tensor | None] = {
            result.name.removeprefix("grad_"): value
            for result, value, want in zip(spec.backward.results, results, mask, strict=True)
            if want
        }
        for name, (chain, parameter) in chained.items():
            value = by_name.pop(name)
            assert value is not None
            chain.put(parameter, value)
        return (None, *(by_name.get(name) for name in call.inputs), *([None] * len(ctx.rest)))

    return type(
        f"{spec.name}_continued",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
