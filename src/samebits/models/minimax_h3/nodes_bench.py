"""Times the two fused AdaLN nodes, ``adaln_modulation`` and ``final_adaln_out``, against the same lines of diffusers.

    python -m samebits.models.minimax_h3.nodes_bench --out benchmarks/results/minimax_h3.jsonl

The layout's ``samebits.Segments`` are made once, as a model does it that uses them in fifty blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import samebits
from samebits import environment
from samebits.bench import results, work
from samebits.bench.peers import COPY
from samebits.bench.timing import CudaMachine, Machine
from samebits.bench.work import Work
from samebits.models.minimax_h3 import provider
from samebits.models.minimax_h3.geometry import CHUNKS, DTYPE, MODALITIES, OFFICIAL, Geometry
from samebits.models.minimax_h3.layouts import interleaved

OP = "minimax_h3"
SEQ_LENS = (264, 4097, 32768, 131072)
TIMESTEPS = 3
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
OURS = "samebits"

Function = Callable[..., Any]


@dataclass(frozen=True)
class Node:
    """One of the two: how it is called by us and by the peer, on which tensors."""

    name: str
    ours: Function
    theirs: Function
    leaves: tuple[Tensor, ...]
    index: Tensor
    table_rows: int
    upstream: tuple[Tensor, ...]

    def bytes(self, direction: str) -> int:
        """Every leaf and result once forward; backward the upstream, every leaf, and a gradient of every leaf."""
        leaves, positions = _bytes(self.leaves), _bytes(self.upstream)
        return (leaves + positions) * (direction != "bwd") + (2 * leaves + positions) * (direction != "fwd")


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def nodes(seq_len: int, geometry: Geometry, device: torch.device) -> tuple[Node, Node]:
    """Both nodes at one sequence length, with random weights."""
    generator = torch.Generator(device).manual_seed(1)
    h, d = geometry.hidden_size, geometry.time_embed

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    def leaf(*shape: int, **options: Any) -> Tensor:
        return normal(*shape, **options).requires_grad_()

    steps, tags = (part.to(device) for part in interleaved(seq_len, TIMESTEPS, 1))
    temb = leaf(TIMESTEPS, d, dtype=torch.float32)
    parts = MODALITIES * CHUNKS
    block = Node(
        "adaln_modulation",
        samebits.adaln_modulation,
        provider.adaln_modulation,
        (temb, leaf(parts * h, d, scale=d**-0.5), leaf(parts * h, scale=0.1)),
        steps * MODALITIES + tags,
        MODALITIES * TIMESTEPS,
        tuple(normal(seq_len, h) for _ in range(CHUNKS)),
    )
    final = Node(
        "final_adaln_out",
        samebits.final_adaln_out,
        provider.final_adaln_out,
        (leaf(seq_len, h), leaf(h), temb, leaf(2 * h, d, scale=d**-0.5), leaf(2 * h, scale=0.1)),
        steps,
        TIMESTEPS,
        (normal(seq_len, h),),
    )
    return block, final


def timed(name: str, node: Node, function: Function, index: Any, direction: str, compiled: bool = False) -> Work:
    return work.through_autograd(name, function, (*node.leaves, index), node.leaves, node.upstream, direction, compiled)


def measure(
    machine: Machine, seq_lens: Sequence[int], directions: Sequence[str], geometry: Geometry = OFFICIAL
) -> Iterator[dict[str, Any]]:
    """Result lines, one for each node, length and direction; ``contract`` is the node."""
    here = environment.collect()
    for seq_len in seq_lens:
        for node in nodes(seq_len, geometry, machine.device):
            shared = samebits.segments(node.index, node.table_rows)
            for direction in directions:
                moved = node.bytes(direction)
                works = [
                    timed(OURS, node, node.ours, shared, direction),
                    timed("diffusers eager", node, node.theirs, node.index, direction),
                    timed("torch.compile", node, node.theirs, node.index, direction, compiled=True),
                    work.device_copy(COPY, machine.device, moved),
                ]
                found = machine.measure(works)
                shape = {"T": seq_len, "H": geometry.hidden_size}
                head = {"op": OP, "direction": direction, "shape": shape, "dtype": "bfloat16"}
                named = {**head, "contract": node.name, "backend": "cuda"}
                yield results.of_parts(named, found.pop(OURS), found, moved, machine, here)
                machine.release()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seq-lens", type=int, nargs="*", default=list(SEQ_LENS))
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=list(DIRECTIONS))
    given = parser.parse_args()
    results.record(given.out, measure(CudaMachine(), given.seq_lens, given.directions))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
