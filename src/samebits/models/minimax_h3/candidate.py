"""What is replayed: a callable for each stage, our operators unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits import registry
from samebits.models.minimax_h3.stages import NAMES

OPERATORS = "samebits"
PROVIDER = "samebits.models.minimax_h3.provider"


@dataclass
class Candidate:
    """A callable for each stage, and for the fused node."""

    bindings: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    """Stage to a callable, ``module:function`` or ``file.py:function``, in place of the default."""
    backend: str | None = None
    """Of our operators; None takes the first that accepts a call."""
    contracts: Mapping[str, str] = field(default_factory=dict)
    """Stage to contract name; the operator's default where absent."""
    _found: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in (*self.bindings, *self.contracts):
            if name not in NAMES:
                raise ValueError(f"no stage named {name!r}; choose one of {', '.join(NAMES)}")
        for name in self.contracts:
            if not self.is_operator(name):
                raise ValueError(f"stage {name} runs {self.owner(name)}, which has no contracts")
            self.contract(name)  # refuses a name that the operator does not have
        declared = [registry.spec(name) for name in NAMES if self.is_operator(name) and name in registry.names()]
        known = sorted({backend.name for spec in declared for backend in spec.backends})
        if self.backend is not None and self.backend not in known:
            raise ValueError(f"backend {self.backend!r}: the operators of the stages have {', '.join(known) or 'none'}")

    def owner(self, name: str) -> str:
        """``module:function`` of what runs the stage."""
        bound = self.bindings.get(name) or f"{OPERATORS}:{name}"
        if isinstance(bound, str):
            return bound
        return f"{getattr(bound, '__module__', '?')}:{getattr(bound, '__qualname__', type(bound).__name__)}"

    def is_operator(self, name: str) -> bool:
        return self.owner(name) == f"{OPERATORS}:{name}"

    def is_stand_in(self, name: str) -> bool:
        """Whether the stage was given to the eager provider, which promises nothing."""
        return self.owner(name).startswith(f"{PROVIDER}:")

    def contract(self, name: str) -> str:
        """The contract whose bits the stage has; empty for what has none."""
        asked = self.contracts.get(name)
        if not self.is_operator(name):
            return ""
        return registry.spec(name).contract(asked).name if name in registry.names() else asked or ""

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
        options = {"backend": self.backend, "contract": self.contracts.get(name)}
        return lambda **arguments: function(**arguments, **options)
