"""Times a block of MiniMax-H3 with our operators patched in against the unmodified block of diffusers.

    python -m samebits.models.minimax_h3.block_bench --out benchmarks/results/minimax_h3_block.jsonl

Three timesteps, random weights. Each line has device time by CUDA-graph replay, interleaved with the peers, and ``eager_us``: the
time of a call without a graph, back to back, which short sequences feel; there, too, we and diffusers take turns, since a
processor is faster one moment than the next, and the ratio is that of neighbours. The layout's ``samebits.Segments`` are made
once, as a model does it that has fifty blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import samebits
from samebits import environment
from samebits.bench import results, work
from samebits.bench.peers import COPY
from samebits.bench.timing import CudaMachine, Failure, Machine, Sample
from samebits.bench.work import Run, Work
from samebits.environment import Environment
from samebits.models.minimax_h3.block_peer import build_block
from samebits.models.minimax_h3.geometry import CHUNKS, DTYPE, MODALITIES, OFFICIAL, Geometry
from samebits.models.minimax_h3.layouts import interleaved
from samebits.models.minimax_h3.nodes_bench import OP
from samebits.ops.rope_3axis.tables import rope_3axis_tables

NODE = "block"
"""Stands where a line has its contract."""
SEQ_LENS = (264, 925, 3160, 16384)
TIMESTEPS = 3
DIRECTIONS = ("fwd", "fwd+bwd")
OURS, EAGER, COMPILED = "samebits", "diffusers eager", "torch.compile"
NO_GRAPH = "diffusers without a graph"
NEITHER_GRAPH = "diffusers, both without a graph"
ROUNDS, ROUND_SECONDS = 15, 0.03
"""Eager calls back to back: how often each takes its turn, and for how long."""


@dataclass(frozen=True)
class Subject:
    """Both blocks with the same parameters, and what they are called with."""

    ours: nn.Module
    theirs: nn.Module
    hidden: Tensor
    temb: Tensor
    index: Tensor
    rotary: tuple[Tensor, Tensor]
    upstream: Tensor

    def leaves(self, block: nn.Module) -> list[Tensor]:
        return [self.hidden, self.temb, *block.parameters()]


def subject(seq_len: int, geometry: Geometry, device: torch.device) -> Subject:
    """A block at one sequence length, all of its leaves with a gradient."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    theirs = build_block(geometry).to_empty(device=device).to(DTYPE)
    with torch.no_grad():
        for parameter in theirs.parameters():
            matrix = parameter.dim() == 2
            drawn = normal(*parameter.shape, scale=parameter.shape[-1] ** -0.5 if matrix else 0.1)
            parameter.copy_(drawn if matrix else drawn + 1)
    ours = copy.deepcopy(theirs)
    samebits.patch(ours)
    steps, tags = (part.to(device) for part in interleaved(seq_len, TIMESTEPS, 1))
    positions = torch.stack([torch.arange(seq_len, device=device) // (7**axis) % 97 for axis in range(3)], dim=-1)
    return Subject(
        ours,
        theirs,
        normal(1, seq_len, geometry.hidden_size).requires_grad_(),
        normal(TIMESTEPS, geometry.time_embed, dtype=torch.float32).requires_grad_(),
        steps * MODALITIES + tags,
        rope_3axis_tables(positions, frequencies=geometry.rope_frequencies),
        normal(1, seq_len, geometry.hidden_size),
    )


def timed(name: str, given: Subject, block: nn.Module, index: Any, direction: str, compiled: bool = False) -> Work:
    arguments, leaves = (given.hidden, given.temb, index, given.rotary), given.leaves(block)
    return work.through_autograd(name, block, arguments, leaves, (given.upstream,), direction, compiled)


@dataclass(frozen=True)
class Eager:
    """Microseconds of a call in a row of calls without a graph, ours and theirs in turns: host or device, whichever is slower."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times as long theirs takes: the median over neighbours in time."""
        return statistics.median(other / one for one, other in zip(self.ours, self.theirs, strict=True))


def without_a_graph(ours: Work, theirs: Work, device: torch.device) -> Eager:
    runs = [work.prepare() for work in (ours, theirs)]
    calls = []
    for run in runs:
        run()
        calls.append(max(2, int(ROUND_SECONDS * 1e6 / _back_to_back(run, 2, device))))
    with _no_collection():
        turns = [[_back_to_back(run, n, device) for run, n in zip(runs, calls, strict=True)] for _ in range(ROUNDS)]
    mine, others = zip(*turns, strict=True)
    return Eager(mine, others)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection of garbage falls on whoever allocates next, whatever he has to do with it."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _back_to_back(run: Run, calls: int, device: torch.device) -> float:
    """Microseconds of one of so many calls."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return (time.perf_counter() - started) * 1e6 / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations(seq_len: int, geometry: Geometry, direction: str) -> int:
    """Multiplications and additions of the products; the backward has each twice."""
    h, inner, f = geometry.hidden_size, geometry.inner_dim, geometry.ffn_dim
    rows = 2 * seq_len * (4 * h * inner + 3 * h * f)
    attention = 4 * seq_len * seq_len * inner
    projection = 2 * TIMESTEPS * MODALITIES * CHUNKS * h * geometry.time_embed
    forward = rows + attention + projection
    return forward if direction == "fwd" else 3 * forward


def least_bytes(given: Subject, direction: str) -> int:
    """Parameters and rows once; with a backward also the upstream, parameters again, and a gradient of each."""
    parameters = sum(p.numel() * p.element_size() for p in given.theirs.parameters())
    rows = given.hidden.numel() * given.hidden.element_size()
    return parameters + 2 * rows if direction == "fwd" else 3 * parameters + 4 * rows


def measure(
    machine: Machine,
    seq_lens: Sequence[int],
    directions: Sequence[str],
    geometry: Geometry = OFFICIAL,
    with_compile: bool = True,
) -> Iterator[dict[str, Any]]:
    """Result lines, one for each length and direction."""
    here = environment.collect()
    for seq_len in seq_lens:
        given = subject(seq_len, geometry, machine.device)
        shared = samebits.segments(given.index, MODALITIES * TIMESTEPS)
        for direction in directions:
            ours = timed(OURS, given, given.ours, shared, direction)
            eager = timed(EAGER, given, given.theirs, given.index, direction)
            works = [ours, eager, work.device_copy(COPY, machine.device, least_bytes(given, direction))]
            if with_compile:
                works.append(timed(COMPILED, given, given.theirs, given.index, direction, compiled=True))
            found = machine.measure(works)
            yield _line(
                found, without_a_graph(ours, eager, machine.device), given, seq_len, geometry, direction, machine, here
            )
            machine.release()
        del given, shared


def _line(
    found: dict[str, Sample | Failure],
    walls: Eager,
    given: Subject,
    seq_len: int,
    geometry: Geometry,
    direction: str,
    machine: Machine,
    here: Environment,
) -> dict[str, Any]:
    shape = {"T": seq_len, "H": geometry.hidden_size}
    head = {"op": OP, "direction": direction, "shape": shape, "dtype": "bfloat16", "contract": NODE, "backend": "cuda"}
    ours = found.pop(OURS)
    line = results.of_parts(head, ours, found, least_bytes(given, direction), machine, here)
    if isinstance(ours, Failure):
        return line
    line["tflops"] = round(operations(seq_len, geometry, direction) / ours.us * 1e-6, 1)
    line["bits"] = "the nodes inside are checked by the replay of the block"
    theirs, least = statistics.median(walls.theirs), min(walls.theirs)
    line["eager_us"], line["eager_us_min"] = round(statistics.median(walls.ours), 3), round(min(walls.ours), 3)
    line["peers"][NO_GRAPH] = {"us": round(theirs, 3), "us_min": round(least, 3), "ratio": round(theirs / ours.us, 4)}
    line["peers"][NEITHER_GRAPH] = {"us": round(theirs, 3), "us_min": round(least, 3), "ratio": round(walls.ratio, 4)}
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seq-lens", type=int, nargs="*", default=list(SEQ_LENS))
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes a minute")
    given = parser.parse_args()
    lines = measure(CudaMachine(), given.seq_lens, given.directions, with_compile=not given.no_compile)
    results.record(given.out, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
