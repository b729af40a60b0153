"""One entry of the report: everything that is known of one contestant."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samebits import registry
from samebits.bench import modes
from samebits.bench.peers import Peer
from samebits.bench.timing import Machine
from samebits.bench.work import LeftOut
from samebits.compare import accuracy, invariance, latency
from samebits.compare.bitwise import Equality
from samebits.compare.contestant import Contestant, Problem, our_contestant, peer_contestant
from samebits.compare.request import Request
from samebits.exact.bits import digest

OURS = "samebits"
_MESSAGE = 400


class Bench:
    """The inputs of a comparison and our operator on them. Entries are made one after the other."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.op = registry.operator(request.op)
        self.device = torch.device(request.device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # kernels of a peer may be launched on the current device
        self.problems = [self._problem(seed) for seed in request.scale.seeds]
        self.ours = our_contestant(self.op, request.contract, request.backend, OURS)
        self._machine: Machine | None = None
        self._golden: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def _problem(self, seed: int) -> Problem:
        r = self.request
        free = {axis: r.sizes[axis] for axis, _, _ in self.op.spec.size_limits}
        return Problem(self.op, r.contract, r.backend, self.device, r.scale.drawn, seed, free)

    def prepare_times(self) -> None:
        """What cannot take times says so here, before minutes of work."""
        self._machine = latency.machine_for(self.device, self.request.scale.seconds)

    # --- entries --------------------------------------------------------------------------------------------------

    def our_entry(self) -> dict[str, Any]:
        return guarded(head(OURS, None), lambda entry: self._judge(entry, self.ours))

    def entry(self, peer: Peer) -> dict[str, Any]:
        def fill(entry: dict[str, Any]) -> None:
            made = peer_contestant(self.op.spec, peer)
            entry["versions"] = _versions(peer)
            entry["equality"] = self._equality(made).to_json()
            self._judge(entry, made)

        return guarded(head(peer.name, peer), fill)

    def times(self, others: list[Peer]) -> dict[str, list[dict[str, Any]]]:
        """Of ours (under the empty name) and of these peers, interleaved."""
        r, machine = self.request, self._machine
        assert machine is not None, "prepare_times comes first"
        return latency.measure(self.op, r.contract, r.backend, r.sizes, r.scale.timed, others, machine)

    def digests(self) -> dict[str, str]:
        """Of the inputs and of our results, to show that two processes compared the same."""
        batch = self.problems[0].drawn(range(max(self.request.scale.alone)))
        return {
            "inputs": _digest(batch.rows | batch.shared | {f"grad_{n}": t for n, t in batch.upstream.items()}),
            "ours": _digest(self.ours.run(batch).values),
        }

    def _judge(self, entry: dict[str, Any], contestant: Contestant) -> None:
        scale = self.request.scale
        entry["invariance"] = invariance.examine(contestant, self.problems, scale).to_json()
        found = contestant.run(self.problems[0].drawn(range(scale.judged)))
        golden = self._judged(contestant.outputs)
        entry["accuracy"] = accuracy.to_json(accuracy.errors(found, golden, self.problems[0]))

    def _judged(self, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        if outputs not in self._golden:
            self._golden[outputs] = self.problems[0].judge(self.request.scale.judged, outputs)
        return self._golden[outputs]

    def _equality(self, other: Contestant) -> Equality:
        """Ours gives the same results and gradients as the peer for this, so that the same sums are compared."""
        mine = replace(self.ours, outputs=other.outputs, gradients=other.gradients)
        found = Equality()
        for rows in dict.fromkeys((1, *self.request.scale.alone)):
            batch = self.problems[0].drawn(range(rows))
            found.compare(rows, mine.run(batch), other.run(batch))
        return found


def head(name: str, peer: Peer | None) -> dict[str, Any]:
    return {
        "name": name,
        "peer": None if peer is None else peer.name,
        "mode": None,
        "compiled": peer is not None and peer.compiled,
        "cast": {} if peer is None else dict(peer.cast),
        "status": "compared",
        "reason": None,
        "versions": {},
        "process": process_state(),
        "equality": None,
        "invariance": None,
        "accuracy": None,
        "latency": [],
    }


def not_compared(peer: Peer, mode: modes.Mode | None, status: str, reason: str) -> dict[str, Any]:
    """The entry of what was not run. It has no verdict."""
    made = head(peer.name if mode is None else f"{peer.name}, {mode.name}", peer)
    return made | {"mode": None if mode is None else mode.name, "status": status, "reason": reason, "process": None}


def guarded(entry: dict[str, Any], fill: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What was found before an error stays in the entry, beside the error."""
    try:
        fill(entry)
    except (LeftOut, ImportError) as error:
        entry |= {"status": "unavailable", "reason": reason(error)}
    except Exception as error:
        entry |= {"status": "failed", "reason": reason(error)}
    return entry


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_MESSAGE]
    return text if isinstance(error, LeftOut) else f"{type(error).__name__}: {text}"


def process_state() -> dict[str, Any]:
    """What this process is set to, of all that a mode may set."""
    switches = {path: _switch(path) for path in modes.SWITCHES}
    return {
        "environment": {name: os.environ[name] for name in modes.VARIABLES if name in os.environ},
        "switches": switches,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def _switch(path: str) -> bool | str:
    owner: Any = torch
    try:
        for part in path.split(".")[1:]:
            owner = getattr(owner, part)
    except (AttributeError, RuntimeError) as error:  # torch refuses to read a switch whose successor was set
        return reason(error)
    return owner if isinstance(owner, bool) else repr(owner)


def _versions(peer: Peer) -> dict[str, str]:
    """Versions of the modules that the peer needs, where their package says one."""
    if not peer.needs:
        return {}
    packages = importlib.metadata.packages_distributions()
    return {m: importlib.metadata.version(packages[m][0]) for m in peer.needs if packages.get(m)}


def _digest(tensors: dict[str, Tensor]) -> str:
    parts = [f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}" for name, tensor in tensors.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
