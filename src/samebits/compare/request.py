"""What a comparison was asked for, as plain data: it also travels to the processes that run a mode."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.bench import peers
from samebits.bench.peers import Peer
from samebits.compare.scale import Scale


@dataclass(frozen=True)
class Request:
    op: str
    contract: str
    backend: str
    device: str
    """``cpu``, ``cuda`` or ``cuda:N``."""
    sizes: dict[str, int]
    """Of every axis."""
    scale: Scale
    peers_file: str | None = None
    """A Python file with ``PEERS`` in place of the operator's own."""
    latency: bool = True

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def peers(self) -> tuple[Peer, ...]:
        if self.peers_file is None:
            return peers.of(self.op)
        return peers.validated(self.op, declared_in(Path(self.peers_file)))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_json(plain: dict[str, Any]) -> Request:
    scale: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain["scale"].items()}
    return Request(**{**plain, "scale": Scale(**scale)})


def declared_in(path: Path) -> tuple[Peer, ...]:
    """ValueError where the file has no ``PEERS``; OSError where there is none; what the file raises, as it is."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of peers")
    source = importlib.util.spec_from_file_location(f"samebits_peers_{path.stem}", path)
    if source is None or source.loader is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    declared = getattr(module, "PEERS", None)
    if not isinstance(declared, tuple) or not all(isinstance(peer, Peer) for peer in declared):
        raise ValueError(f"{path}: expected PEERS, a tuple of samebits.bench.peers.Peer")
    return declared
