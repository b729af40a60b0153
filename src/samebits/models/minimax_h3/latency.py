"""How long a stage takes, ours and the peer's, on the arguments of the isolated execution. Forward alone, for orientation.

The peer is timed by the eager provider: the operations of diffusers one by one, with its bits. The peer itself would bring
along what a replay needs to look into it: modules that are built for one call, and all of the block up to the line of interest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from samebits.bench.timing import Failure, Machine, Sample
from samebits.bench.work import Run, Work
from samebits.models.minimax_h3 import provider
from samebits.models.minimax_h3.chain import Arguments, Chain, Implementation, Stage

SECONDS = 0.02
"""For the rounds of one stage; some are made in any case."""
METHODS = {
    "graph": "CUDA-graph replays, cold L2",
    "events": "CUDA events around calls without a graph, cold L2",
    "host clock": "the host's clock around calls",
}
_OURS, _PEER = "ours", "peer"

Clock = Callable[[Chain, Stage, Implementation, Arguments], "Latency"]


@dataclass(frozen=True)
class Latency:
    """Microseconds of one forward call, the median of ``calls``."""

    ours: float | None
    peer: float | None
    """None: it was not measured; ``how`` says why."""
    calls: int
    how: str


def clock(device: torch.device) -> Clock:
    """What times stages on a device: device time on a GPU, with ours and the peer in turns."""
    from samebits.compare.latency import machine_for

    return on(machine_for(device, SECONDS))


def on(machine: Machine) -> Clock:
    def measure(chain: Chain, stage: Stage, candidate: Implementation, arguments: Arguments) -> Latency:
        def work(name: str, implementation: Implementation) -> Work:
            def run() -> tuple[torch.Tensor, ...]:
                return stage.run(implementation, arguments)

            def prepare() -> Run:
                return run

            return Work(name, prepare)

        found = machine.measure([work(_OURS, candidate), work(_PEER, chain.by(provider))])
        ours, peer = found[_OURS], found[_PEER]
        said = dict.fromkeys((_how(ours), _how(peer)))
        how = next(iter(said)) if len(said) == 1 else f"{_OURS}: {_how(ours)}; {_PEER}: {_how(peer)}"
        return Latency(_us(ours), _us(peer), max(_calls(ours), _calls(peer)), how)

    return measure


def _us(found: Sample | Failure) -> float | None:
    return None if isinstance(found, Failure) else round(found.us, 2)


def _calls(found: Sample | Failure) -> int:
    return 0 if isinstance(found, Failure) else found.rounds


def _how(found: Sample | Failure) -> str:
    return f"not measured: {found.reason}" if isinstance(found, Failure) else METHODS[found.method]
