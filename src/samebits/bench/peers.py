"""How an operator's folder declares what it is compared with. Loaded from ``samebits/ops/<op>/peers.py``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samebits.bench.modes import Mode, missing
from samebits.contract import OpSpec

COPY = "device copy"
"""Every case is also compared with a device copy that moves the same number of bytes (read plus written)."""


@dataclass(frozen=True)
class Peer:
    """Somebody else's way to the same result, up to rounding.

    ``run`` takes the forward inputs in the order of the declaration, without derived ones, then the scalars, and returns the
    public results.
    Its backward is what autograd makes of it.
    """

    name: str
    run: Callable[..., tuple[Any, ...]]
    compiled: bool = False
    """Take ``torch.compile(run)``; it is timed specialised to the shape."""
    cast: tuple[tuple[str, str], ...] = ()
    """(input, dtype) that the peer needs otherwise than our contract gives it; cast once, outside the timed region."""
    needs: tuple[str, ...] = ()
    """Modules that it imports when it runs. Where one is not installed the peer is unavailable, which is never a pass."""
    cuda: bool = False
    """It runs on an NVIDIA GPU alone."""
    outputs: tuple[str, ...] | None = None
    """The public results that it returns, in this order, where it does not give all of them."""
    gradients: tuple[str, ...] | None = None
    """The inputs it has gradients for, where not all that the operator gives; ``()`` for a forward alone."""
    modes: tuple[Mode, ...] = ()
    """Process-wide modes that ``samebits compare`` also runs it in. It is timed by ``samebits bench`` without them."""

    def unavailable(self, device: str) -> str | None:
        """Why it cannot run on this type of device (``cuda`` or ``cpu``), or None."""
        for module in self.needs:
            absent = missing(module)
            if absent is not None:
                return absent
        return "it runs on an NVIDIA GPU alone" if self.cuda and device != "cuda" else None

    def results(self, spec: OpSpec) -> tuple[str, ...]:
        """Names of what ``run`` returns."""
        public = tuple(r.name for r in spec.forward.results if not r.hidden)
        return public if self.outputs is None else self.outputs

    def leaves(self, spec: OpSpec) -> tuple[str, ...]:
        """Names of the inputs whose gradients it computes, in the order in which the operator gives them."""
        learned = tuple(r.name.removeprefix("grad_") for r in spec.backward.results)
        return tuple(name for name in learned if self.gradients is None or name in self.gradients)


def of(op: str) -> tuple[Peer, ...]:
    """The declared peers of an operator; none where it has no ``peers.py``."""
    module = f"samebits.ops.{op}.peers"
    if importlib.util.find_spec(module) is None:
        return ()
    declared: tuple[Peer, ...] = importlib.import_module(module).PEERS
    return validated(op, declared)


def validated(op: str, declared: tuple[Peer, ...]) -> tuple[Peer, ...]:
    """ValueError where names are not unique or not those of the operator, so that no typo leaves something out."""
    from samebits import registry

    spec = registry.spec(op)
    if len({peer.name for peer in declared}) != len(declared):
        raise ValueError(f"peers of {op}: two have the same name")
    public = {r.name for r in spec.forward.results if not r.hidden}
    inputs = {arg.name for arg in spec.forward.inputs}
    learned = set(spec.learned)
    for peer in declared:
        if peer.outputs == ():
            raise ValueError(f"peer {peer.name!r} of {op}: without an output there is nothing to compare")
        for field, given, known in (
            ("outputs", set(peer.outputs or ()), public),
            ("gradients", set(peer.gradients or ()), learned),
            ("cast", {name for name, _ in peer.cast}, inputs),
        ):
            if given - known:
                raise ValueError(
                    f"peer {peer.name!r} of {op}: {field} names {sorted(given - known)}, known are {sorted(known)}"
                )
        if len({mode.name for mode in peer.modes}) != len(peer.modes):
            raise ValueError(f"peer {peer.name!r} of {op}: two modes have the same name")
    return declared
