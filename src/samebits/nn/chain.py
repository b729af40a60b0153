"""Parameter gradients of several backward passes as one left fold.

The gradient of a parameter is a fold over the rows in their order. Micro-batches that each fold their own rows from +0
and are added afterwards give other bits than one batch. A :class:`GradientChain` instead hands the running sum of one
backward to the next, as the value its fold starts from, so that the bytes are those of the single batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samebits.nn.gain import fold_gain

_open: list[GradientChain] = []
"""The chains that are open. Process-wide, as a backward runs on threads of torch's own; bound when a forward runs."""


@dataclass
class _Slot:
    parameter: Tensor
    segments: tuple[int, ...] | None = None
    """Set where the parameter is a scale: the buffer holds the gradient of the gain that it was expanded to."""
    buffer: Tensor | None = None
    ragged: int = 0
    """Rows of the last chunk of a fast contract, where it was not a whole one: nothing can continue behind it."""


class GradientChain:
    """The running parameter gradients of a set of parameters, FP32, one buffer for each.

    While the chain is open (``with chain:``), a forward through :func:`samebits.nn.boundary_open` or a module of
    ``samebits.nn`` binds to it the parameters that it knows; their backward then takes the buffer as the start of its
    fold, puts the result back, and gives autograd nothing. :meth:`finish` writes ``.grad``. Every forward must have its
    backward before :meth:`finish`. The buffer of a scale is that of the gain it is expanded to, (24,); the segments are
    folded once, at the end.

    A subclass may override :meth:`take` and :meth:`put` to receive the start from, and pass the result to, another rank.

    Args:
        parameters: FP32 leaves that require grad and whose ``.grad`` is None.

    Raises:
        ValueError: one of them has another dtype, is no leaf, is frozen, or has a gradient already.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._slots: dict[int, _Slot] = {}
        self.finished = False
        for parameter in parameters:
            _require(parameter)
            self._slots[id(parameter)] = _Slot(parameter)
        if not self._slots:
            raise ValueError("a gradient chain needs at least one parameter")

    # --- what another rank may replace ----------------------------------------------------------------------------

    def take(self, parameter: Tensor) -> Tensor | None:
        """Where the next fold of this parameter starts; None: from +0."""
        return self._slots[id(parameter)].buffer

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """The result of the fold that :meth:`take` was the start of."""
        self._slots[id(parameter)].buffer = value

    # --- use ------------------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor | None]]:
        """(parameter, running sum) in the order in which the parameters were given."""
        return [(slot.parameter, slot.buffer) for slot in self._slots.values()]

    def knows(self, parameter: Tensor) -> bool:
        return id(parameter) in self._slots

    def expands(self, parameter: Tensor, segments: tuple[int, ...]) -> None:
        """Said by a forward: this parameter is a scale, and the gradients that follow are those of its gain."""
        self._slots[id(parameter)].segments = segments

    def continue_with(self, parameter: Tensor, rows: int, chunk: int) -> Tensor | None:
        """:meth:`take` for a batch of so many rows, under a contract whose folds go in chunks of ``chunk`` rows.

        Raises:
            RuntimeError: the chain was finished, or an earlier batch ended inside a chunk.
        """
        if self.finished:
            raise RuntimeError(
                "a backward reached a gradient chain that was finished; end every backward inside the block"
            )
        slot = self._slots[id(parameter)]
        if slot.ragged and rows:
            raise RuntimeError(
                f"this contract folds rows in chunks of {chunk}, and an earlier micro-batch ended {slot.ragged} rows into "
                f"one, so its bits cannot be continued; make every micro-batch but the last a multiple of {chunk} rows, or "
                f"use an ascending contract"
            )
        slot.ragged = rows % chunk
        return self.take(parameter)

    def finish(self) -> None:
        """Write ``.grad`` of every parameter that had a backward. The chain takes nothing more.

        Raises:
            RuntimeError: a parameter has got a gradient beside the chain, so the sum would not be one fold.
        """
        self.finished = True
        for slot in self._slots.values():
            if slot.parameter.grad is not None:
                raise RuntimeError(
                    "a parameter of a gradient chain got a gradient that did not pass through the chain (a forward outside "
                    "the block, a compiled function, or another use of the parameter)"
                )
        for slot in self._slots.values():
            if slot.buffer is not None:
                value = slot.buffer if slot.segments is None else fold_gain(slot.buffer, slot.segments)
                slot.parameter.grad = value.view(slot.parameter.shape)

    def __enter__(self) -> GradientChain:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "open samebits.accumulate around a compiled call, not inside it: it would be traced away"
            )
        shared = [chain for chain in _open if not chain._slots.keys().isdisjoint(self._slots)]
        if shared:
            raise RuntimeError("a parameter of this gradient chain belongs to another one that is open")
        _open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _open.remove(self)


@contextmanager
def accumulate(target: nn.Module | Iterable[Tensor]) -> Iterator[GradientChain]:
    """Let the backward passes inside the block continue one fold over all their rows; set ``.grad`` at its end.

    The parameter gradients have the bytes of one batch made of the micro-batches in the order of their backward passes::

        with samebits.accumulate(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Hooks of ``torch`` that wait for a parameter's gradient (DistributedDataParallel) do not see these ones.

    Args:
        target: a module, of which the parameters of every ``samebits.nn`` module and every patched module inside take
            part as far as they require grad; or parameters. Other parameters accumulate as always.

    Raises:
        ValueError: nothing takes part, or a parameter has a ``.grad`` already (``zero_grad()`` first).
        RuntimeError: a forward inside the block is compiled; a parameter got a gradient beside the chain; under a ``fast``
            contract a micro-batch that is not the last has a number of rows that is no multiple of 256.
    """
    chain = GradientChain(chained_parameters(target) if isinstance(target, nn.Module) else target)
    with chain:
        yield chain
    chain.finish()


def chained_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters below a module whose gradient is a fold that can be continued, frozen ones left out."""
    found: dict[int, Tensor] = {}
    for member in module.modules():
        for parameter in getattr(member, "samebits_parameters", tuple)():
            if parameter.requires_grad:
                found[id(parameter)] = parameter
    if not found:
        raise ValueError(
            f"{type(module).__name__} holds no trainable parameter whose gradient samebits folds: build it from "
            f"samebits.nn, or patch the model first"
        )
    return list(found.values())


Bound = Mapping[str, tuple[GradientChain, Tensor]]
"""Input of an operator to the chain that takes its gradient, and the parameter it is known by there."""


def bind(leaves: Mapping[str, Tensor]) -> Bound:
    """Which of the inputs belong to a chain that is open.

    Raises:
        RuntimeError: while a compiler traces, which could not follow the chain.
    """
    if not _open:
        return {}
    if torch.compiler.is_compiling():
        raise RuntimeError("samebits.accumulate cannot follow a compiled forward; call the module uncompiled inside it")
    return {name: (chain, leaf) for name, leaf in leaves.items() for chain in _open if chain.knows(leaf)}


def _require(parameter: Tensor) -> None:
    if parameter.dtype != torch.float32 or not parameter.is_leaf or not parameter.requires_grad:
        raise ValueError(
            f"a gradient chain takes FP32 leaves that require grad, got {tuple(parameter.shape)} {parameter.dtype}, "
            f"is_leaf={parameter.is_leaf}, requires_grad={parameter.requires_grad}"
        )
    if parameter.grad is not None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} already has a gradient; zero_grad() before the chain begins"
        )
