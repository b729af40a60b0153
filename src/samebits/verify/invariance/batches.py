"""The inputs of a model in another batch: fewer rows, another order, rows beside them, longer sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.verify.trace.nested import leaves

EXTRA = 3
"""Rows, or positions, that padding adds: enough for another tile size, few enough to cost nothing."""


@dataclass(frozen=True)
class Batch:
    """Inputs as the model takes them, and which of their tensors have rows."""

    inputs: Any
    """A tensor, or tuples, lists and mappings of them."""
    axis: int
    rows: int
    shared: tuple[str, ...] = ()
    """Places or keys of tensors that are the same for every row, whatever their shape."""
    gradients: bool = False
    """Whether inputs that are numbers ask for gradients."""

    @classmethod
    def of(cls, inputs: Any, axis: int, shared: Sequence[str], gradients: bool = False) -> Batch:
        """Raises ValueError where no batch of at least two rows is found along ``axis``."""
        found = [
            t.shape[axis]
            for place, t in leaves(("inputs", inputs)).tensors
            if t.dim() > axis and not _is(place, shared)
        ]
        if not found:
            raise ValueError(f"no input has a batch axis {axis}")
        if found[0] < 2:
            raise ValueError(f"the batch has {found[0]} rows along axis {axis}; invariance needs at least 2")
        return cls(inputs, axis, found[0], tuple(shared), gradients)

    def take(self, rows: Sequence[int]) -> Any:
        """Only these rows, in this order."""
        return self._each(lambda t: t.index_select(self.axis, torch.tensor(list(rows), device=t.device)))

    def with_others(self) -> Any:
        """All rows, with others behind them: copies of the first ones, of twice the size where they are numbers."""
        others = torch.arange(EXTRA) % self.rows

        def extended(t: Tensor) -> Tensor:
            added = t.index_select(self.axis, others.to(t.device))
            return torch.cat([t, added * 2 if t.is_floating_point() else added], self.axis)

        return self._each(extended)

    def with_longer(self, axis: int) -> Any:
        """Zeros behind every sequence, in the mask too: positions that a causal or masked model must not look at."""
        length = self.length(axis)

        def extended(t: Tensor) -> Tensor:
            if t.dim() <= axis or t.shape[axis] != length:
                return t
            return torch.cat([t, t.new_zeros(*t.shape[:axis], EXTRA, *t.shape[axis + 1 :])], axis)

        return self._each(extended)

    def length(self, axis: int) -> int:
        """Positions per sequence. Raises ValueError where no input has them."""
        for _, t in self._batched():
            if t.dim() > axis:
                return t.shape[axis]
        raise ValueError(f"no input has a sequence axis {axis}")

    def _batched(self) -> list[tuple[str, Tensor]]:
        return [(place, t) for place, t in leaves(("inputs", self.inputs)).tensors if self._has_rows(place, t)]

    def _has_rows(self, place: str, t: Tensor) -> bool:
        return t.dim() > self.axis and t.shape[self.axis] == self.rows and not _is(place, self.shared)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Any:
        return self._map("inputs", self.inputs, change)

    def _map(self, place: str, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            if not self._has_rows(place, value):
                return value
            numbers = value.is_floating_point() or value.is_complex()
            return change(value.detach()).requires_grad_(numbers and (self.gradients or value.requires_grad))
        if isinstance(value, Mapping):
            return {key: self._map(f"{place}.{key}", child, change) for key, child in value.items()}
        if isinstance(value, (tuple, list)):
            made = [self._map(f"{place}.{index}", child, change) for index, child in enumerate(value)]
            return made if isinstance(value, list) else tuple(made)
        return value


def _is(place: str, names: Sequence[str]) -> bool:
    return any(place in (name, f"inputs.{name}") for name in names)
