"""How an operator's folder declares what it is compared with. Loaded from ``samebits/ops/<op>/peers.py``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COPY = "device copy"
"""Every case is also compared with a device copy that moves the same number of bytes (read plus written)."""


@dataclass(frozen=True)
class Peer:
    """Somebody else's way to the same result, up to rounding.

    ``run`` takes the forward inputs in the order of the declaration, then the scalars, and returns the public results.
    Its backward is what autograd makes of it.
    """

    name: str
    run: Callable[..., tuple[Any, ...]]
    compiled: bool = False
    """Time ``torch.compile(run)``, specialised to the shape."""
    cast: tuple[tuple[str, str], ...] = ()
    """(input, dtype) that the peer needs otherwise than our contract gives it; cast once, outside the timed region."""


def of(op: str) -> tuple[Peer, ...]:
    """The declared peers of an operator; none where it has no ``peers.py``."""
    module = f"samebits.ops.{op}.peers"
    if importlib.util.find_spec(module) is None:
        return ()
    declared: tuple[Peer, ...] = importlib.import_module(module).PEERS
    return declared
