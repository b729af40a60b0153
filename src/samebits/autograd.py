"""Autograd from the declaration, and the derivatives that are refused because part of them would silently be missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from samebits.checks import dtype_name

if TYPE_CHECKING:
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


def autograd_function(op: Operator) -> type[torch.autograd.Function]:
    """Autograd from the declaration: backward inputs named ``grad_<result>`` are upstream gradients, all others were saved."""
    spec = op.spec
    forward_inputs = [arg.name for arg in spec.forward.inputs]
    forward_results = [result.name for result in spec.forward.results]
    saved = [arg.name for arg in spec.backward.inputs if arg.name in (*forward_inputs, *forward_results)]
    gradient_of = [result.name.removeprefix("grad_") for result in spec.backward.results]
    leaves = [r.name.removeprefix("grad_") for r in spec.backward.results if r.dtype == "grad"]

    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results = as_tuple(op._forward_op(*args))
        known = dict(zip(forward_inputs, args, strict=False)) | dict(zip(forward_results, results, strict=True))
        ctx.save_for_backward(*(known[name] for name in saved))
        ctx.rest = args[len(forward_inputs) :]
        ctx.grad_dtype = dtype_name(known[leaves[0]].dtype) if leaves else "float32"
        ctx.results = {name: (r.shape, r.dtype) for name, r in zip(forward_results, results, strict=True)}
        ctx.dtypes = {name: known[name].dtype for name in forward_inputs if known[name] is not None}
        ctx.set_materialize_grads(False)
        hidden = [result for result, declared in zip(results, spec.forward.results, strict=True) if declared.hidden]
        if hidden:
            ctx.mark_non_differentiable(*hidden)
        return results

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        known: dict[str, Tensor | None] = dict(zip(saved, ctx.saved_tensors, strict=True))
        if torch.is_grad_enabled():
            refuse_second_derivative(spec.name)
        grads = {f"grad_{name}": grad for name, grad in zip(forward_results, upstream, strict=True)}
        tensors: list[Tensor | None] = []
        for arg in spec.backward.inputs:
            tensor = grads[arg.name] if arg.name in grads else known.get(arg.name)
            if tensor is None and not arg.optional:
                declared = spec.forward.result(arg.name.removeprefix("grad_"))
                like = next(t for t in known.values() if t is not None)
                shape, dtype = ctx.results[declared.name]
                tensor = like.new_zeros(shape, dtype=dtype)
            tensors.append(tensor)
        needed = dict(zip(forward_inputs, ctx.needs_input_grad, strict=False))
        mask = [needed[leaf] for leaf in gradient_of]
        with torch._C._AutoDispatchBelowAutograd():
            results = as_tuple(op._backward_op(*tensors, *ctx.rest, ctx.grad_dtype, mask))
        # A gradient that the contract keeps in FP32 is rounded here, once, where its leaf is narrower.
        by_name: dict[str, Tensor | None] = {
            leaf: value.to(ctx.dtypes[leaf])
            for leaf, value, want in zip(gradient_of, results, mask, strict=True)
            if want
        }
        by_name |= {name: grads[f"grad_{result}"] for name, result in spec.through if needed[name]}
        return (*(by_name.get(name) for name in forward_inputs), *([None] * len(ctx.rest)))

    return type(
        f"{spec.name}_function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
