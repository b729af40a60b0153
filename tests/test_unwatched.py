"""A call skips torch's dispatcher only where nobody listens there; what listens sees every call, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import samebits
from samebits.observers import unwatched

OP, BACKWARD = "samebits.h_aggregate.default", "samebits.h_aggregate_backward.default"


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4).requires_grad_(), torch.randn(3, 4, 8).bfloat16().requires_grad_()


def both(pre: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    hidden = samebits.h_aggregate(pre, residual)
    return (hidden.detach(), *torch.autograd.grad(hidden, (pre, residual), torch.ones_like(hidden)))


class Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Callable[..., object], types: object, args=(), kwargs=None) -> object:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_tensors_are_unwatched():
    assert unwatched([torch.ones(2), None, torch.nn.Parameter(torch.ones(2))])


def test_a_dispatch_mode_sees_both_directions():
    given = inputs()
    expected = both(*given)
    with Listening() as mode:
        assert not unwatched(given)
        got = both(*given)
    assert OP in mode.heard
    assert BACKWARD in mode.heard
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_function_mode_sees_the_call():
    heard = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    with Functions():
        samebits.h_aggregate(*inputs())
    assert OP in heard


def test_a_profiler_sees_both_directions():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        both(*inputs())
    names = {event.name for event in profile.events()}
    assert {"samebits::h_aggregate", "samebits::h_aggregate_backward"} <= names


def test_a_subclass_sees_the_call():
    class HeardError(Exception):
        pass

    class Sub(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise HeardError(str(func))

    pre, residual = (t.detach() for t in inputs())
    assert not unwatched([pre, residual.as_subclass(Sub)])
    with pytest.raises(HeardError, match=OP):
        samebits.h_aggregate(pre, residual.as_subclass(Sub))


def test_a_function_transform_is_not_skipped():
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(unwatched([x]))
        return x * 2

    torch.func.vmap(call)(torch.ones(2, 3))
    assert seen == [False]


def test_a_traced_call_is_in_the_graph():
    pre, residual = (t.detach() for t in inputs())
    traced = torch.jit.trace(lambda a, b: samebits.h_aggregate(a, b), (pre, residual), check_trace=False)
    assert "samebits::h_aggregate" in str(traced.graph)
    other = residual * 2
    assert torch.equal(traced(pre, other), samebits.h_aggregate(pre, other))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_not_accepted_is_refused_all_the_same(requires_grad: bool):
    pre = torch.randn(3, 4, dtype=torch.float64).requires_grad_(requires_grad)
    residual = torch.randn(3, 4, 8).bfloat16()
    with pytest.raises(TypeError, match=r"pre has dtype torch\.float64"):
        samebits.h_aggregate(pre, residual)
    with pytest.raises(TypeError, match=r"residual must be a torch\.Tensor"):
        samebits.h_aggregate(pre, None)
