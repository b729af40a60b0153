"""Tensors in whatever a module takes and returns: tuples, lists, mappings, dataclasses, in any nesting."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DEPTH = 12
"""Nesting that is followed; what lies deeper is named as opaque."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LONGEST_VALUE = 200


@dataclass(slots=True)
class Leaves:
    """What a structure holds, each with its place."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)


def leaves(*parts: tuple[str, Any]) -> Leaves:
    """Walk named structures, e.g. ``("args", args), ("kwargs", kwargs)``, in their own order."""
    found = Leaves()
    for name, value in parts:
        if type(value) is tuple:  # the arguments of every call
            for index, child in enumerate(value):
                if type(child) is Tensor:
                    found.tensors.append((f"{name}.{index}", child))
                else:
                    _walk(f"{name}.{index}", child, found, 1)
        elif type(value) is Tensor:
            found.tensors.append((name, value))
        elif type(value) is not dict or value:
            _walk(name, value, found, 0)
    return found


def _walk(where: str, value: Any, found: Leaves, depth: int) -> None:
    if isinstance(value, Tensor):
        found.tensors.append((where, value))
    elif type(value) is tuple and depth < DEPTH:  # this and the next: the arguments of nearly every call
        for index, child in enumerate(value):
            _walk(f"{where}.{index}", child, found, depth + 1)
    elif type(value) is dict and depth < DEPTH:
        for key, child in value.items():
            _walk(f"{where}.{key}", child, found, depth + 1)
    elif isinstance(value, _PLAIN):
        text = repr(value)
        found.values[where] = text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
    else:
        inner = None if depth == DEPTH else _children(value)
        if inner is None:
            found.opaque.append(f"{where}: {type(value).__name__}")
        else:
            for key, child in inner:
                _walk(f"{where}.{key}", child, found, depth + 1)


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The parts of a container with their names; None for anything else."""
    if isinstance(value, Mapping):
        return ((str(key), child) for key, child in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (tuple, list)):
        return ((str(index), child) for index, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((name, getattr(value, name)) for name in _fields(type(value)) if hasattr(value, name))
    return None


@functools.lru_cache(maxsize=1024)
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
