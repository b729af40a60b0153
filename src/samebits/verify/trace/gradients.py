"""The backward of each call, without a node of ours in the graph.

torch's own full backward hooks put a node around every module. That splits the sums in which a tensor's gradients meet, and a
sum in another order has other bits: the trace would change what it watches. Here a hook on each output tensor reads the gradient
that arrives, and hooks on the existing nodes at the call's border read what the call contributes to each input.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.verify.trace.events import Event
from samebits.verify.trace.recorder import Call, Recorder

_LAST = 2**64 - 1
"""Sequence number of the nodes that accumulate; they have none of their own."""
PRUNE = 1 << 16
"""Handles after which those of graphs that are gone are dropped."""


class Gradients:
    """Hooks on the graphs of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        self._lock = threading.Lock()

    def before(self, call: Call, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Note where the gradients of the inputs will go. An in-place operation inside the call would move it."""
        call.begin = torch._C._autograd._get_sequence_nr()
        for where, tensor in inputs:
            node = tensor.grad_fn
            if node is not None:
                call.edges.append((where, node, tensor.output_nr))
            elif tensor.requires_grad:  # a leaf
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                call.edges.append((where, edge.node, edge.output_nr))

    def after(self, call: Call, outputs: Sequence[tuple[str, Tensor]]) -> None:
        """Watch the gradients of the outputs, and the call's nodes that feed the inputs."""
        roots = [(where, t) for where, t in outputs if t.requires_grad]
        if not roots:
            call.edges = []
            return
        watched = _Backward(self._recorder, call.event, keep=self._recorder.options.keeps(call.event.path))
        for where, tensor in roots:
            if tensor.grad_fn is None or tensor.is_inference():
                continue  # a leaf that was handed through
            self._add(tensor.register_hook(watched.arrival(f"grad.{where}")))
        for where, border in _border(call, [t for _, t in roots]).items():
            for index, (node, slot) in enumerate(border):
                place = f"grad.{where}" + (f"#{index}" if index else "")
                self._add(node.register_hook(watched.contribution(place, slot)))
        call.edges = []

    def parameter(self, path: str, parameter: Tensor) -> None:
        """Record a parameter's gradient whenever it was accumulated."""

        def accumulated(leaf: Tensor) -> None:
            if self._recorder.closed or leaf.grad is None:
                return
            event = self._recorder.event("gradient", "backward", path)
            keep = self._recorder.options.keeps(path)
            event.outputs = self._recorder.records(event, ((f"grad.{path}", leaf.grad),), rows=False, keep=keep)
            self._recorder.emit(event)

        self._add(parameter.register_post_accumulate_grad_hook(accumulated))

    def remove(self) -> None:
        with self._lock:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _add(self, handle: Any) -> None:
        with self._lock:
            self._handles.append(handle)
            if len(self._handles) > PRUNE and len(self._handles) % PRUNE == 1:
                self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]


class _Backward:
    """The backward of one call: an event that begins with the first gradient that arrives."""

    def __init__(self, recorder: Recorder, forward: Event, keep: bool) -> None:
        self._recorder, self._forward, self._keep = recorder, forward, keep
        self._event: Event | None = None
        self._noted: set[tuple[bool, str]] = set()
        """What has been noted in this event."""

    def arrival(self, where: str) -> Callable[[Tensor], None]:
        return functools.partial(self._note, where, True)

    def contribution(self, where: str, slot: int) -> Callable[..., None]:
        def hook(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            grad = grad_inputs[slot]
            if grad is not None:
                self._note(where, False, grad)

        return hook

    def _note(self, where: str, arrived: bool, grad: Tensor) -> None:
        if self._recorder.closed:
            return
        event = self._event
        if event is None or (arrived, where) in self._noted:
            # The first gradient, or a second walk through a retained graph.
            event = self._event = self._recorder.event("module", "backward", self._forward.path, self._forward.cls)
            event.parent, event.depth = self._forward.start, self._forward.depth
            self._recorder.emit(event)
            self._noted.clear()
        self._noted.add((arrived, where))
        found = self._recorder.records(event, ((where, grad),), keep=self._keep)
        if arrived:
            event.inputs = [*event.inputs, *found]
        else:
            event.outputs = [*event.outputs, *found]
        event.end = self._recorder.tick()


def _border(call: Call, outputs: Sequence[Tensor]) -> dict[str, list[tuple[Any, int]]]:
    """For each input: the call's nodes that contribute to its gradient, as (node, slot), in the order in which they will run.

    Walks back from the outputs and stops at the inputs and at whatever is older than the call.
    """
    wanted = {(id(node), number): where for where, node, number in reversed(call.edges)}
    if not wanted:
        return {}
    found: dict[str, list[tuple[Any, int]]] = {where: [] for where in wanted.values()}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None and (id(t.grad_fn), t.output_nr) not in wanted]
    seen: dict[int, Any] = {}  # holds the nodes, so that an id stays theirs
    while stack:
        node = stack.pop()
        made = node._sequence_nr()
        if made < call.begin or (made == _LAST and node.name().endswith("AccumulateGrad")) or id(node) in seen:
            continue
        seen[id(node)] = node
        for slot, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            where = wanted.get((id(following), number))
            if where is not None:
                found[where].append((node, slot))
            else:
                stack.append(following)
    for border in found.values():
        border.sort(key=lambda entry: (-entry[0]._sequence_nr(), entry[1]))
    return found
