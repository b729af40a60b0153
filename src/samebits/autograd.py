"""Autograd from the declaration, and the derivatives that are refused because part of them would silently be missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from samebits.checks import Request, dtype_name
from samebits.observers import unwatched

if TYPE_CHECKING:
    from samebits.contract import OpSpec
    from samebits.operator import Operator


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def refuse_tangents(name: str, tensors: Sequence[Tensor | None]) -> None:
    """Forward-mode AD marks a tensor by its tangent, not by requires_grad; an operator that does not look drops it."""
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError(
            f"{name}: forward-mode AD (jvp, jacfwd) is not supported; a dropped tangent would be silently wrong"
        )


def refuse_second_derivative(name: str) -> None:
    raise RuntimeError(
        f"{name}: double backward (create_graph=True) is not supported; "
        "a partial second derivative would be silently wrong"
    )


def refuse_inference(spec: OpSpec, tensors: Sequence[Tensor | None]) -> None:
    for arg, tensor in zip(spec.forward.inputs, tensors, strict=True):
        if tensor is not None and tensor.is_inference():
            raise RuntimeError(
                f"{spec.name}: {arg.name} was created under torch.inference_mode() and cannot be saved for backward; "
                f"pass {arg.name}.clone() made outside inference mode"
            )


def autograd_functions(op: Operator) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """Autograd from the declaration: backward inputs named ``grad_<result>`` are upstream gradients, all others were saved.

    The first takes the arguments of the torch op; the second (scalars, contract, backend, out_dtype) as one argument, then the
    tensors, for a forward at which nobody listens, which was found out already. What follows from the declaration is looked up
    here, once; a call only indexes.
    """
    spec = op.spec
    count = len(spec.forward.inputs)
    settings = count + len(spec.scalars) + 2  # contract and backend, which both directions share
    inputs = [arg.name for arg in spec.forward.inputs]
    outputs = [result.name for result in spec.forward.results]
    place = {name: at for at, name in enumerate((*inputs, *outputs))}
    names = [arg.name for arg in spec.backward.inputs]
    gradient_at = {f"grad_{name}": at for at, name in enumerate(outputs)}
    upstream_of = [gradient_at.get(name) for name in names]
    kept = [name for name in names if name in place]
    kept_at = [place[name] for name in kept]
    saved_at = [kept.index(name) if name in kept else None for name in names]
    demanded = [
        (at, above)
        for at, above in enumerate(upstream_of)
        if above is not None and not spec.backward.inputs[at].optional
    ]
    hidden = [at for at, result in enumerate(spec.forward.results) if result.hidden]
    leaves = [inputs.index(result.name.removeprefix("grad_")) for result in spec.backward.results]
    typical = next((at for at, r in zip(leaves, spec.backward.results, strict=True) if r.dtype == "grad"), None)
    wide = [(names.index(f"grad_{r.name}"), inputs.index(r.dtype)) for r in spec.forward.results if r.wide]
    dtyped = tuple(dict.fromkeys((*leaves, *(leaf for _, leaf in wide))))
    through = [(inputs.index(name), outputs.index(result)) for name, result in spec.through]

    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        results = op.below_autograd(False, *args)
        ctx.first = 0
        keep(ctx, args[:count], (args[count : settings - 2], *args[settings - 2 : settings]), results)
        return results

    def unheard_forward(ctx: Any, given: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        values, contract, backend, out_dtype = given
        results = op.run(Request(False, tensors, values, contract, backend, "float32", None, out_dtype))
        ctx.first = 1
        keep(ctx, tensors, (values, contract, backend), results)
        return results

    def keep(ctx: Any, tensors: tuple[Any, ...], rest: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        known = (*tensors, *results)
        ctx.save_for_backward(*[known[at] for at in kept_at])
        ctx.rest = rest
        ctx.grad_dtype = "float32" if typical is None else dtype_name(tensors[typical].dtype)
        ctx.results = [(result.shape, result.dtype) for result in results]
        ctx.dtypes = {at: tensors[at].dtype for at in dtyped if tensors[at] is not None}
        ctx.set_materialize_grads(False)
        if hidden:
            ctx.mark_non_differentiable(*[results[at] for at in hidden])

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative(spec.name)
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        tensors = [
            upstream[above] if above is not None else (saved[at] if at is not None else None)
            for above, at in zip(upstream_of, saved_at, strict=True)
        ]
        for at, above in demanded:
            if tensors[at] is None:
                like = next(tensor for tensor in saved if tensor is not None)
                shape, dtype = ctx.results[above]
                tensors[at] = like.new_zeros(shape, dtype=dtype)
        for at, leaf in wide:
            given, dtype = tensors[at], ctx.dtypes[leaf]
            if given is not None and given.dtype is not dtype:
                tensors[at] = given.to(dtype)
        first = ctx.first
        needed = ctx.needs_input_grad[first:]
        mask = [needed[leaf] for leaf in leaves]
        values, contract, backend = ctx.rest
        if not torch.compiler.is_compiling() and unwatched(tensors):
            results = op.run(Request(True, tensors, values, contract, backend, ctx.grad_dtype, mask))
        else:
            results = op.below_autograd(True, *tensors, *values, contract, backend, ctx.grad_dtype, mask)
        gradients: list[Tensor | None] = [None] * len(needed)
        for leaf, value, want in zip(leaves, results, mask, strict=True):
            if want:  # what the contract keeps in FP32 is rounded here, once, where its leaf is narrower
                gradients[leaf] = value if value.dtype is ctx.dtypes[leaf] else value.to(ctx.dtypes[leaf])
        for leaf, result in through:
            if needed[leaf]:
                gradients[leaf] = upstream[result]
        return (None, *gradients) if first else tuple(gradients)

    def function(forward: Any) -> type[torch.autograd.Function]:
        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(f"{spec.name}_function", (torch.autograd.Function,), body)

    return function(forward), function(unheard_forward)
