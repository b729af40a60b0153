"""A part of the model as stages in order: what each reads, which operator runs it, what it promises.

A stage takes the arguments of its operator. What runs is any callable with that signature: our operator, the peer, the eager
provider, the golden, or a function of the user. To replace one is the whole integration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.dispatch import UnsupportedError
from samebits.models.minimax_h3.measure import Error
from samebits.verify.tolerance import Tolerance, tolerance

Outputs = tuple[Tensor, ...]
History = dict[str, Outputs]
"""Outputs of the stages so far; every implementation has its own."""
Arguments = dict[str, Any]
Implementation = Callable[[str], Callable[..., Any]]
"""From the name of a stage to what runs it."""

EVERYWHERE = ("cpu", "cuda")
ON_CUDA = ("cuda",)
NOWHERE: tuple[str, ...] = ()


class StageError(RuntimeError):
    """What runs a stage raised an exception, or returned something else than tensors."""


def call(name: str, implementation: Implementation, arguments: Arguments) -> Outputs:
    """The outputs of a stage, always a tuple."""
    function = implementation(name)
    try:
        made = function(**arguments)
    except UnsupportedError:  # the caller's choice of backend or contract, not the stage's fault
        raise
    except Exception as error:
        raise StageError(f"stage {name} raised {type(error).__name__}: {error}") from error
    outputs = (made,) if isinstance(made, Tensor) else tuple(made) if isinstance(made, (tuple, list)) else ()
    if not outputs or not all(isinstance(value, Tensor) for value in outputs):
        raise StageError(f"stage {name} returned a {type(made).__name__}; expected a tensor or a tuple of tensors")
    return outputs


@dataclass(frozen=True)
class Stage:
    name: str
    arguments: Callable[[Any, History], Arguments]
    """What the stage is called with, given the case and what the stages before it made."""
    rows: Mapping[str, int]
    """Arguments that have rows, and along which axis: what can be run in parts."""
    output_axis: int
    """Of the rows in every output."""
    promised_on: tuple[str, ...]
    """Device types on which the stage, fed by the peer, has the peer's bits. Elsewhere agreement is only measured."""
    kind: str
    """Of its tolerance: ``"elementwise"`` or ``"reduction"``."""
    narrow: tuple[str, ...] = ()
    """Tables that a row alone needs one row of: with them the row is computed without its neighbours' table rows too."""
    index: str = "index"
    """The argument that points into the tables of ``narrow``."""
    operator: str = ""
    """Whose signature it has; the stage's own name where empty."""
    batch: tuple[str, ...] = ()
    """Arguments whose first axis is a batch of sequences, which may be joined by another sequence."""
    keep: int | None = None
    """How many of the outputs are the stage's; None: all."""

    def limit(self, dtype: torch.dtype) -> Tolerance:
        return tolerance(self.kind, dtype, gradient=False)

    def run(self, implementation: Implementation, arguments: Arguments) -> Outputs:
        return call(self.name, implementation, arguments)[: self.keep]

    def count(self, arguments: Arguments) -> int:
        name, axis = next(iter(self.rows.items()))
        return int(arguments[name].shape[axis])

    def part(self, arguments: Arguments, start: int, stop: int) -> Arguments:
        """The same call for rows ``start`` to ``stop`` alone; one row takes only its own rows of ``narrow`` tables along."""
        chosen = arguments | {
            name: arguments[name].narrow(axis, start, stop - start) for name, axis in self.rows.items()
        }
        if self.narrow and stop - start == 1:
            row = int(chosen[self.index])
            chosen |= {name: arguments[name][row : row + 1] for name in self.narrow}
            chosen[self.index] = torch.zeros_like(chosen[self.index])
        return chosen

    def beside(self, arguments: Arguments, first: bool) -> Arguments:
        """The same call with a second sequence in the batch (this one, rows backwards), which comes first or second."""
        joined = {}
        for name in self.batch:
            pair = (arguments[name], arguments[name].flip(1))
            joined[name] = torch.cat(pair[::-1] if first else pair)
        return arguments | joined


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which they run."""

    name: str
    stages: tuple[Stage, ...]
    close: Callable[[Error, Error], bool]
    """Whether a stage with the first error is close enough to the golden, where the peer has the second."""
    composites: tuple[str, ...] = ()
    """Operators that can be bound, too, and are no stage: several stages as one."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a callable can be bound to."""
        return (*(stage.name for stage in self.stages), *self.composites)

    def operator(self, name: str) -> str:
        """The operator whose signature ``name`` has.

        Raises:
            ValueError: nothing of that name is in the chain.
        """
        if name not in self.names:
            raise ValueError(f"no stage named {name!r}; choose one of {', '.join(self.names)}")
        return next((stage.operator for stage in self.stages if stage.name == name), "") or name

    def by(self, home: Any) -> Implementation:
        """Runs every stage by the attribute of ``home`` that is named like its operator."""
        return lambda name: getattr(home, self.operator(name))
