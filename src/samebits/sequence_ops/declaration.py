"""What an operator of sequences says of itself, as data. Imports no torch.

A row here reads other rows, and sizes obey rules of their own, so nothing is generated from this: schema, checks and autograd are
the operator's own code. It is what the workbench lists, explains and judges by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.contract import BackendSpec, Contract, Declared


@dataclass(frozen=True)
class TensorSpec:
    """One tensor; ``shape`` as the documentation writes it, e.g. ``(B, S_q, H, D)``."""

    name: str
    shape: str
    dtypes: tuple[str, ...]
    doc: str = ""


@dataclass(frozen=True)
class SequencePass:
    """One direction. ``inputs`` in the order of the torch operator's tensors."""

    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    values: tuple[str, ...] = ()
    """What is computed between them and has an order or a rounding point in the contracts."""

    def names(self) -> set[str]:
        """Everything that a contract may speak of in this direction."""
        return {result.name for result in self.results} | set(self.values)


@dataclass(frozen=True)
class SequenceSpec(Declared):
    name: str
    summary: str
    forward: SequencePass
    backward: SequencePass
    contracts: tuple[Contract, ...]
    backends: tuple[BackendSpec, ...]
    """In order of preference."""
    edges: tuple[str, ...] = field(default=())
    """Documented behaviour at the edges: nothing to see, NaN, empty sequences."""

    def direction(self, backward: bool) -> SequencePass:
        return self.backward if backward else self.forward
