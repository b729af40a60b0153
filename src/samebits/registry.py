"""Finds the operators. A folder in ``samebits/ops`` with a ``spec.py`` is an operator; there is no other list."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import threading
from typing import TYPE_CHECKING

from samebits import contract, ops

if TYPE_CHECKING:
    from samebits.operator import Operator


@functools.cache
def names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(ops.__path__) if module.ispkg))


@functools.cache
def spec(name: str) -> contract.OpSpec:
    """The declaration of one operator, validated. Needs no torch."""
    if name not in names():
        raise ValueError(f"no operator named {name!r}; known: {', '.join(names())}")
    declared: contract.OpSpec = importlib.import_module(f"samebits.ops.{name}.spec").SPEC
    if declared.name != name:
        raise ValueError(f"folder ops/{name} declares an operator named {declared.name!r}; the two must agree")
    contract.validate(declared)
    return declared


_operators: dict[str, Operator] = {}
_registering = threading.RLock()


def operator(name: str) -> Operator:
    """The operator itself: its torch ops are registered, once for the process, when this returns."""
    with _registering:
        if name not in _operators:
            from samebits.operator import Operator

            _operators[name] = Operator(spec(name))
        return _operators[name]


def public_names() -> tuple[str, ...]:
    """What ``samebits.<name>`` offers for the operators: each one and its explicit backward."""
    return tuple(f"{name}{suffix}" for name in names() for suffix in ("", "_backward"))


def home_of(name: str) -> str | None:
    """The module that defines the public function ``samebits.<name>``, if an operator has one."""
    owner = name.removesuffix("_backward")
    return f"samebits.ops.{owner}.api" if owner in names() else None
