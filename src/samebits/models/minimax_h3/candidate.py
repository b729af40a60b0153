"""What is replayed: a callable for each stage, our operators unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits import registry
from samebits.models.minimax_h3.chain import Chain
from samebits.models.minimax_h3.stages import CONDITIONING
from samebits.sequence_ops.attention import contracts as attention

OPERATORS = "samebits"
PROVIDER = "samebits.models.minimax_h3.provider"


@dataclass
class Candidate:
    """A callable for each stage of a chain, and for its composites."""

    bindings: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    """Stage to a callable, ``module:function`` or ``file.py:function``, in place of the default."""
    backend: str | None = None
    """Of our operators; None takes the first that accepts a call."""
    contracts: Mapping[str, str] = field(default_factory=dict)
    """Stage to contract name; the operator's default where absent."""
    chain: Chain = CONDITIONING
    _found: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in (*self.bindings, *self.contracts):
            self.chain.operator(name)  # refuses a name that is not in the chain
        for name in self.contracts:
            if not self.is_operator(name):
                raise ValueError(f"stage {name} runs {self.owner(name)}, which has no contracts")
            self.contract(name)  # refuses a name that the operator does not have
        operators = {self.chain.operator(name) for name in self.chain.names if self.is_operator(name)}
        known = sorted({backend for operator in operators for backend in _backends(operator)})
        if self.backend is not None and self.backend not in known:
            raise ValueError(f"backend {self.backend!r}: the operators of the stages have {', '.join(known) or 'none'}")

    def owner(self, name: str) -> str:
        """``module:function`` of what runs the stage."""
        bound = self.bindings.get(name) or f"{OPERATORS}:{self.chain.operator(name)}"
        if isinstance(bound, str):
            return bound
        return f"{getattr(bound, '__module__', '?')}:{getattr(bound, '__qualname__', type(bound).__name__)}"

    def is_operator(self, name: str) -> bool:
        return self.owner(name) == f"{OPERATORS}:{self.chain.operator(name)}"

    def is_stand_in(self, name: str) -> bool:
        """Whether the stage was given to the eager provider, which promises nothing."""
        return self.owner(name).startswith(f"{PROVIDER}:")

    def contract(self, name: str) -> str:
        """The contract whose bits the stage has; empty for what has none."""
        asked, operator = self.contracts.get(name), self.chain.operator(name)
        if not self.is_operator(name):
            return ""
        if operator == attention.NAME:
            return attention.recipe(asked or attention.CUDNN.contract.name).contract.name
        return registry.spec(operator).contract(asked).name if operator in registry.names() else asked or ""

    def __call__(self, name: str) -> Callable[..., Any]:
        if name not in self._found:
            self._found[name] = self._resolve(name)
        return self._found[name]

    def _resolve(self, name: str) -> Callable[..., Any]:
        bound = self.bindings.get(name)
        if bound is not None and not isinstance(bound, str):
            return bound
        from samebits.verify.callables import importable_from_here, resolve

        with importable_from_here():
            function, _ = resolve(self.owner(name))
        if not self.is_operator(name):
            return function
        asked = {"backend": self.backend, "contract": self.contracts.get(name)}
        options = {option: value for option, value in asked.items() if value is not None}
        return lambda **arguments: function(**arguments, **options)


def _backends(operator: str) -> tuple[str, ...]:
    if operator == attention.NAME:
        from samebits.sequence_ops.attention.op import BACKENDS

        return tuple(backend.name for backend in BACKENDS)
    return tuple(b.name for b in registry.spec(operator).backends) if operator in registry.names() else ()
