"""Every operator that the workbench takes: those of rows (``samebits.ops``), which ``registry`` finds, and those of sequences
(``samebits.sequence_ops``).

A command asks an operator for as little as it needs: its declaration (:data:`Declared`), or one module of its folder
(:func:`part`). ``samebits/sequence_ops/README.md`` lists the modules of an operator of sequences, and which command takes which.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

from samebits import registry, sequence_ops
from samebits.contract import OpSpec
from samebits.sequence_ops.declaration import SequenceSpec

if TYPE_CHECKING:
    from samebits.audit.build import Build


Declared = OpSpec | SequenceSpec
"""Both say name, summary, contracts, backends, edges, and the tensors of each direction."""


@functools.cache
def of_sequences() -> tuple[str, ...]:
    """The operators whose rows read other rows of their sequence."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(sequence_ops.__path__) if module.ispkg))


def names() -> tuple[str, ...]:
    return tuple(sorted((*registry.names(), *of_sequences())))


def declared(name: str) -> Declared:
    """The declaration of one operator. Needs no torch. ValueError: there is none of this name."""
    if name in of_sequences():
        return sequence(name)
    if name not in registry.names():
        raise ValueError(f"no operator named {name!r}; known: {', '.join(names())}")
    return registry.spec(name)


def tensors(name: str, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs and of the results of one direction, in the order of the torch operator."""
    direction = declared(name).direction(backward)
    return tuple(arg.name for arg in direction.inputs), tuple(result.name for result in direction.results)


def sequence(name: str) -> SequenceSpec:
    """The declaration of an operator of sequences."""
    spec: SequenceSpec = importlib.import_module(f"{home(name)}.spec").SPEC
    return spec


def home(name: str) -> str:
    """The package of an operator, e.g. ``samebits.ops.linear``."""
    return f"samebits.{'sequence_ops' if name in of_sequences() else 'ops'}.{name}"


def has(name: str, module: str) -> bool:
    return importlib.util.find_spec(home(name)) is not None and bool(importlib.util.find_spec(f"{home(name)}.{module}"))


def part(name: str, module: str) -> ModuleType:
    """A module of an operator's folder."""
    return importlib.import_module(f"{home(name)}.{module}")


def builds(name: str, backend: str) -> tuple[Build, ...]:
    """Every kernel that an operator launches by this backend. ImportError or AttributeError where that cannot be said."""
    if name in of_sequences():
        found: tuple[Build, ...] = part(name, "builds").builds(backend)
    else:
        found = registry.operator(name).backend(backend).builds()
    return found
