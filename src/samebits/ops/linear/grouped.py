"""Several linears of the same rows as one call: one launch of each product where the kernels can, and one node of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits import dispatch, observers
from samebits.autograd import refuse_inference, refuse_second_derivative, refuse_tangents
from samebits.checks import Request, dtype_name
from samebits.observers import unwatched
from samebits.operator import KNOWN_CALLS, Decision, _as_kernels_see
from samebits.ops.linear.api import linear
from samebits.registry import operator
from samebits.runtime import device as devices
from samebits.runtime.program import Program, dense, form_of, recorded

_OP = operator("linear")
Call = tuple[Tensor | None, ...]
"""The tensors of one of the calls, in the order of the declaration."""


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """``[linear(x, w, b) for w, b in zip(weights, biases)]``, the same bits in fewer launches: the q, k and v of an attention.

    Args:
        x: (..., K) BF16 or FP16, as in :func:`samebits.linear`.
        weights: (N_i, K) each, in the dtype of x.
        biases: (N_i,) or None each; None: there are none.
        contract, backend: as in :func:`samebits.linear`.

    Returns:
        (..., N_i) for each weight. Differentiable once. The gradient of x is what autograd makes of separate calls in this order
        whose upstream gradients arrive together: each one's gradient is rounded to the dtype of x, and they are added from the
        last to the first, rounded after each addition. (Where x has other uses too, autograd adds theirs before or behind all of
        these, not in between.)

    Raises:
        ValueError: there is no weight, or there are not as many biases.
        TypeError, ValueError: as :func:`samebits.linear`.
    """
    weights = tuple(weights)
    given = (None,) * len(weights) if biases is None else tuple(biases)
    if not weights or len(given) != len(weights):
        raise ValueError(
            f"linear_group: {len(weights)} weights and {len(given)} biases; one or more, and as many, are accepted"
        )
    name = _OP.spec.contract(contract).name
    tensors = (x, *weights, *given)
    if not _apart(tensors):
        calls = [(x, *parts) for parts in zip(weights, given, strict=True)]
        ready = _ready(tensors, calls, False, name, backend)
        if ready is not None:
            refuse_tangents(_OP.name, tensors)
            if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
                for call in calls:
                    refuse_inference(_OP.spec, call)
                made: tuple[Tensor, ...] = _Function.apply(ready, calls, name, backend, *tensors)
                return made
            return tuple(results["y"] for results in _run(ready, calls))
    return tuple(
        linear(x, weight, bias, contract=contract, backend=backend) for weight, bias in zip(weights, given, strict=True)
    )


def _apart(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the calls must be seen one by one: by who watches them, or because a plan of each was asked for."""
    return bool(
        torch.compiler.is_compiling() or observers.OBSERVERS or dispatch.forced_plan() or not unwatched(tensors)
    )


class _Ready(NamedTuple):
    """What follows from the metadata of the calls."""

    decisions: tuple[Decision, ...]
    plan: Any
    program: Program | None
    """What the plan launches, where it has been written down."""
    slots: tuple[tuple[int, int], ...]
    """Of the program: call and place of each tensor that it is given before the results."""


_known: dict[tuple[Any, ...], _Ready | None] = {}


def _ready(
    tensors: Sequence[Tensor | None],
    calls: Sequence[Call],
    backward: bool,
    contract: str,
    backend: str | None,
    grad_dtype: str = "float32",
    mask: tuple[bool, ...] | None = None,
) -> _Ready | None:
    """How the calls run as one, or None where each must go its own way. ``tensors``: each one of the calls' once.

    Raises as each of the calls would.
    """
    key: list[Any] = [backward, len(calls), contract, backend, grad_dtype, mask]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None  # the first call says what is wrong
        else:
            key += tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16, tensor.device
    found = tuple(key)
    if found not in _known:
        if len(_known) >= KNOWN_CALLS:
            _known.clear()
        _known[found] = _decide(calls, backward, contract, backend, grad_dtype, mask)
    return _known[found]


def _decide(
    calls: Sequence[Call],
    backward: bool,
    contract: str,
    backend: str | None,
    grad_dtype: str,
    mask: tuple[bool, ...] | None,
) -> _Ready | None:
    made = [_OP._decision(Request(backward, call, (), contract, backend, grad_dtype, mask)) for call in calls]
    names = {decision.choice.backend for decision in made}
    spoken_of = any(each.copies or dispatch.slower_than_preferred(each.choice, each.call) for each in made)
    if spoken_of or len(names) > 1 or made[0].call.rows == 0:
        return None
    module = _OP.backend(names.pop())
    plans = [decision.choice.plan for decision in made]
    plan = module.together([decision.call for decision in made], plans)
    slots = [
        (at, given.at) for at, each in enumerate(made) for given in each.given if not at or given.declared.name != "x"
    ]
    return _Ready(tuple(made), plan, _program(made, calls, plan, slots), tuple(slots))


def _program(
    decisions: Sequence[Decision], calls: Sequence[Call], plan: Any, slots: Sequence[tuple[int, int]]
) -> Program | None:
    """What ``plan`` launches; None where it is not for kernels, or reads copies."""
    if decisions[0].choice.backend != "cuda" or any(
        given.seen_as is False for each in decisions for given in each.given
    ):
        return None
    seen = [_as_kernels_see(decision, tensors) for decision, tensors in zip(decisions, calls, strict=True)]
    names = [{given.at: given.declared.name for given in each.given} for each in decisions]
    forms = [form_of(seen[call][names[call][at]]) for call, at in slots]
    outputs = [(call, each) for call, decision in enumerate(decisions) for each in decision.outputs if each.wanted]
    forms += [dense(each.shape if each.as_rows is None else each.as_rows, each.dtype) for _, each in outputs]

    def call_it(made: Sequence[Any]) -> None:
        inputs: list[dict[str, Any]] = [{} for _ in decisions]
        results: list[dict[str, Any]] = [{} for _ in decisions]
        for (call, at), tensor in zip(slots, made, strict=False):
            inputs[call][names[call][at]] = tensor
        for given in inputs[1:]:
            given["x"] = inputs[0]["x"]
        for (call, each), tensor in zip(outputs, made[len(slots) :], strict=True):
            results[call][each.declared.name] = tensor
        _OP.backend("cuda").run_together([each.call for each in decisions], plan, inputs, results)

    return recorded(call_it, forms)


def _run(ready: _Ready, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
    """The wanted results of each call, by name."""
    decisions = ready.decisions
    device = decisions[0].device
    if device is not None and device != devices.current_device():
        with torch.cuda.device(device):
            return _run(ready, calls)
    where = decisions[0].where
    results: list[dict[str, Tensor]] = [
        {
            each.declared.name: torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=where)
            for each in decision.outputs
            if each.wanted
        }
        for decision in decisions
    ]
    if ready.program is not None:
        given = [calls[call][at] for call, at in ready.slots]
        addresses = [tensor.data_ptr() for tensor in given if tensor is not None]
        addresses += [result.data_ptr() for made in results for result in made.values()]
        ready.program.run(addresses, where)
        return results
    inputs: list[dict[str, Tensor]] = []
    as_rows: list[dict[str, Tensor]] = []
    for decision, tensors, made in zip(decisions, calls, results, strict=True):
        seen = _as_kernels_see(decision, tensors)
        if inputs:
            seen["x"] = inputs[0]["x"]  # the very same one, of which one map is made
        inputs.append(seen)
        shapes = {each.declared.name: each.as_rows for each in decision.outputs if each.wanted}
        as_rows.append({name: made[name] if rows is None else made[name].view(rows) for name, rows in shapes.items()})
    module = _OP.backend(decisions[0].choice.backend)
    module.run_together([decision.call for decision in decisions], ready.plan, inputs, as_rows)
    return results


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ready: _Ready, calls: Sequence[Call], contract: str, backend: str | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """``tensors``: x, the weights, the biases; ``calls`` hold the same ones."""
        ctx.save_for_backward(*tensors[: 1 + len(calls)])
        ctx.options = contract, backend
        ctx.set_materialize_grads(False)
        return tuple(results["y"] for results in _run(ready, calls))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative(_OP.name)
        x, *weights = ctx.saved_tensors
        count = len(weights)
        needed = ctx.needs_input_grad[4:]
        masks = [(needed[0], needed[1 + at], needed[1 + count + at]) for at in range(count)]
        at = [index for index in range(count) if upstream[index] is not None and any(masks[index])]
        calls: list[Call] = [(upstream[index], x, weights[index], None, None) for index in at]
        gradients = _gradients(calls, [masks[index] for index in at], x, *ctx.options)
        of_x: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * count
        of_biases: list[Tensor | None] = [None] * count
        for index, (grad_x, grad_weight, grad_bias) in reversed(list(zip(at, gradients, strict=True))):
            if grad_x is not None:
                of_x = grad_x if of_x is None else of_x.add_(grad_x)  # nobody else has seen it yet
            of_weights[index] = grad_weight
            of_biases[index] = None if grad_bias is None else grad_bias.to(x.dtype)
        return (None, None, None, None, of_x, *of_weights, *of_biases)


def _gradients(
    calls: Sequence[Call], masks: Sequence[tuple[bool, ...]], x: Tensor, contract: str, backend: str | None
) -> list[tuple[Tensor | None, ...]]:
    """(grad_x, grad_weight, grad_bias) of each call, None where they are not wanted."""
    grad_dtype = dtype_name(x.dtype)
    names = [result.name for result in _OP.spec.backward.results]
    tensors = [x, *(tensor for call in calls for tensor in (call[0], call[2]))]
    if calls and len(set(masks)) == 1 and not _apart(tensors):
        ready = _ready(tensors, calls, True, contract, backend, grad_dtype, masks[0])
        if ready is not None:
            return [tuple(results.get(name) for name in names) for results in _run(ready, calls)]
    gradients: list[tuple[Tensor | None, ...]] = []
    for call, mask in zip(calls, masks, strict=True):
        made = _OP.below_autograd(True, *call, contract, backend, grad_dtype, list(mask))
        gradients.append(tuple(value if want else None for value, want in zip(made, mask, strict=True)))
    return gradients
