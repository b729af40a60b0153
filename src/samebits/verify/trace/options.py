"""What to record."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """Patterns are shell-style, on qualified module names (``model.layers.*.mlp``)."""

    modules: tuple[str, ...] = ()
    """Only these modules, and the outermost one; empty: all."""
    tensors: tuple[str, ...] = ()
    """Modules whose full tensors are kept."""
    rows: int = 0
    """How many axes count the rows; 0: no row digests."""
    batch_axis: int = 0
    """The first of them."""
    gradients: bool = True
    parameters: bool = True
    kernels: bool = False
    reuse: bool = True
    """A tensor that is known, by its storage and torch's count of writes, is not read again."""
    passed_over: bool = False
    """Modules that a patched model runs as a part of another operation run by themselves too, for the trace. Those that ``modules``
    has by their full names do so anyway."""

    def wants(self, path: str) -> bool:
        return not self.modules or any(fnmatch.fnmatchcase(path, pattern) for pattern in self.modules)

    def keeps(self, path: str) -> bool:
        return bool(self.tensors) and any(fnmatch.fnmatchcase(path, pattern) for pattern in self.tensors)

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def make(
    modules: str | Sequence[str],
    tensors: bool | str | Sequence[str],
    rows: bool | int,
    batch_axis: int,
    gradients: bool,
    parameters: bool,
    kernels: bool,
    reuse: bool,
    passed_over: bool,
) -> Options:
    """The options as a caller writes them. Raises TypeError or ValueError for what they cannot be."""
    if isinstance(tensors, bool):
        tensors = ("*",) if tensors else ()
    if not isinstance(rows, int):
        raise TypeError(f"rows is True, False or the number of axes that count the rows, not {type(rows).__name__}")
    if not isinstance(batch_axis, int) or isinstance(batch_axis, bool):
        raise TypeError(f"batch_axis is a number, not {type(batch_axis).__name__}")
    if rows < 0 or batch_axis < 0:
        raise ValueError(f"rows ({rows}) and batch_axis ({batch_axis}) count from the front: at least 0")
    return Options(
        modules=_patterns("modules", modules),
        tensors=_patterns("tensors", tensors),
        rows=int(rows),
        batch_axis=batch_axis,
        gradients=gradients,
        parameters=parameters,
        kernels=kernels,
        reuse=reuse,
        passed_over=passed_over,
    )


def _patterns(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(pattern, str) for pattern in found):
        raise TypeError(f"{name} is a pattern or several of them, e.g. 'model.layers.*.mlp'")
    return found
