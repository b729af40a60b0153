"""What a check examines: something that maps rows to rows, together with its inputs and its judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.verify.tolerance import Tolerance

ZERO_ROW = -1
"""Row id of a padding row of zeros."""
GARBAGE_ROWS = 8
"""Padding rows with wild values; their ids follow those of the canonical rows."""


class UsageError(ValueError):
    """The check cannot be set up as asked. The message says what to change."""


class NotRun(Exception):
    """A check that could not run, and why. Never a pass."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one run: ``rows`` have the batch as their first axis, ``shared`` are the same for every row."""

    ids: tuple[int, ...]
    rows: dict[str, Tensor]
    shared: dict[str, Tensor]
    upstream: dict[str, Tensor]
    """Upstream gradient of each row result."""

    def tensor(self, name: str) -> Tensor:
        return self.rows[name] if name in self.rows else self.shared[name]

    def to(self, dtype: torch.dtype) -> Batch:
        """Every floating tensor cast, for running the same function in FP64."""

        def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t.to(dtype) if t.dtype.is_floating_point else t for n, t in tensors.items()}

        return Batch(self.ids, cast(self.rows), cast(self.shared), cast(self.upstream))


class Pool:
    """Every row a check may need, drawn once: canonical rows, then garbage, then one row of zeros."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = torch.cat([tensor, torch.zeros_like(tensor[:1])])

    def take(self, ids: Sequence[int]) -> Tensor:
        """(len(ids), ...), in memory of its own."""
        index = [i if i != ZERO_ROW else self.tensor.shape[0] - 1 for i in ids]
        where = positions(index, self.tensor.device)
        return self.tensor[where].clone() if isinstance(where, slice) else self.tensor[where]


def positions(index: Sequence[int], device: torch.device) -> slice | Tensor:
    """Places along the first axis; a slice where they follow one another, because a list must travel to the device first.

    A check takes thousands of single rows, and a process that shares its GPU waits long for each such copy.
    """
    if index and all(here == index[0] + step for step, here in enumerate(index)):
        return slice(index[0], index[0] + len(index))
    return torch.tensor(index, dtype=torch.int64, device=device)


class Subject(ABC):
    """A candidate with its inputs and its judge."""

    title: str
    judge_note: str
    """Against what accuracy is judged, in words."""
    rows: int
    device: torch.device

    @abstractmethod
    def batch(self, ids: Sequence[int]) -> Batch:
        """The batch made of these rows, in this order."""

    @abstractmethod
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Results by name, saved ones included."""

    @abstractmethod
    def backward(self, batch: Batch) -> dict[str, Tensor]:
        """Gradients by name of the input. Raises :class:`NotRun` where there is none to take."""

    @abstractmethod
    def is_row(self, name: str, gradient: bool) -> bool:
        """Whether the first axis of this result or gradient is the batch."""

    @abstractmethod
    def golden(self, batch: Batch, gradient: bool) -> dict[str, Tensor]:
        """What the results or gradients should be. Raises :class:`NotRun` where nothing can judge them."""

    @abstractmethod
    def tolerance(self, name: str, dtype: torch.dtype, gradient: bool) -> Tolerance: ...

    def plans(self, batch: Batch, gradient: bool) -> int:
        """How many launch plans this batch has."""
        return 1

    def autograd(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """(gradients through autograd, the explicit ones they must equal), or None where there is only one way."""
        return None

    def reference(self, batch: Batch, gradient: bool) -> dict[str, Tensor] | None:
        """The bits that the contract defines, or None where the candidate claims no contract."""
        return None

    promises_fold: bool = False
    """Parameter gradients are a left fold over ascending rows."""
    canonical_nans: bool = True
    """Compare every NaN as one value."""


def everything(rows: int) -> range:
    """Ids of all drawn rows: canonical and garbage."""
    return range(rows + GARBAGE_ROWS)


def gradients(results: dict[str, Tensor], leaves: dict[str, Tensor], upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the floating leaves for the given upstream. A leaf that the results do not depend on is left out."""
    reached = {name: value for name, value in results.items() if name in upstream and value.requires_grad}
    if not reached:
        raise NotRun("the results do not require a gradient although the inputs do: the callable is not differentiable")
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    try:
        grads = torch.autograd.grad(
            list(reached.values()), list(wanted.values()), [upstream[name] for name in reached], allow_unused=True
        )
    except (RuntimeError, NotImplementedError) as error:
        raise NotRun(f"the backward raised {type(error).__name__}: {first_line(error)}") from error
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0]


def leaf(tensor: Tensor) -> Tensor:
    fresh = tensor.detach().clone()
    return fresh.requires_grad_() if fresh.dtype.is_floating_point else fresh
