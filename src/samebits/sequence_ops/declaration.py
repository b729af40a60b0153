"""What an operator of sequences says of itself, as data. Imports no torch.

A row here reads other rows, and sizes obey rules of their own, so nothing is generated from this: schema, checks and autograd are
the operator's own code. It is what the workbench lists, explains and judges by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.contract import BackendSpec, Contract


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
class SequenceSpec:
    name: str
    summary: str
    forward: SequencePass
    backward: SequencePass
    contracts: tuple[Contract, ...]
    backends: tuple[BackendSpec, ...]
    """In order of preference."""
    edges: tuple[str, ...] = field(default=())
    """Documented behaviour at the edges: nothing to see, NaN, empty sequences."""

    @property
    def default_contract(self) -> Contract:
        return self.contracts[0]

    def contract(self, name: str | None) -> Contract:
        """ValueError: there is no contract of this name. None: the default."""
        if name is None:
            return self.default_contract
        found = next((contract for contract in self.contracts if contract.name == name), None)
        if found is None:
            known = ", ".join(repr(c.name) for c in self.contracts)
            raise ValueError(f"{self.name}: no contract named {name!r}; choose one of {known}")
        return found

    def keeps(self, backend: str, contract: str) -> bool:
        """Whether a backend is declared to give the bits of a contract."""
        return any(declared.name == backend and declared.keeps(contract) for declared in self.backends)

    def direction(self, backward: bool) -> SequencePass:
        return self.backward if backward else self.forward
