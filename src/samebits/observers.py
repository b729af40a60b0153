"""Who watches the calls of our operators: a trace that is open, or whatever listens at torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

OBSERVERS: list[Callable[[str, bool, Sequence[Any], Sequence[Any], Any], None]] = []
"""Called behind each launch with (operator, backward, tensors given, results, the decision that was taken)."""


def tell(operator: str, backward: bool, tensors: Sequence[Any], results: Sequence[Any], decision: Any) -> None:
    """An operator was launched. ``results`` have their values only in the order of the stream."""
    for observe in tuple(OBSERVERS):
        observe(operator, backward, tensors, results, decision)


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def unwatched(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call may skip torch's dispatcher, whose way into Python and back costs more than a launch.

    It may where nobody listens there: no subclass, mode, function transform, tracer or profiler.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator would cost as much as all the rest
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    return True
