"""Who watches the calls of our operators. Nobody, unless a trace is open; then a call costs it a look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

OBSERVERS: list[Callable[[str, bool, Sequence[Any], Sequence[Any], Any], None]] = []
"""Called behind each launch with (operator, backward, tensors given, results, the decision that was taken)."""


def tell(operator: str, backward: bool, tensors: Sequence[Any], results: Sequence[Any], decision: Any) -> None:
    """An operator was launched. ``results`` have their values only in the order of the stream."""
    for observe in tuple(OBSERVERS):
        observe(operator, backward, tensors, results, decision)
