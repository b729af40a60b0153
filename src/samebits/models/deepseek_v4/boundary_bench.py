"""Times one boundary of a layer, norm included: streams to sublayer input, and sublayer output back to streams.

The sublayer itself is left out; its output and the gradient of its input are given tensors. Peers in the same run: the
modules of transformers, eager and compiled, and DeepSeek's TileKernels where installed.

    python -m samebits.models.deepseek_v4.boundary_bench --out benchmarks/results/deepseek_v4.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits import environment
from samebits.bench import results, tile_kernels, work
from samebits.bench.peers import COPY
from samebits.bench.timing import CudaMachine, Machine
from samebits.bench.work import Work
from samebits.nn import boundary_close, boundary_open

OP = "deepseek_v4"
FAMILIES = ("fast-dsv4", "ascending-dsv4")
ROWS = (1, 128, 4096, 32768)
HIDDEN = (4096,)
DIRECTIONS = ("fwd", "fwd+bwd", "bwd")
EPS = 1e-6

Boundary = Callable[["Given"], tuple[Tensor, Tensor]]
"""Given tensors to (sublayer input, new streams)."""


@dataclass(frozen=True)
class Given:
    """The tensors of one measurement. Gradients are asked of everything but the upstream ones."""

    streams: Tensor
    sublayer: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor
    gamma: Tensor
    grad_streams: Tensor
    grad_input: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.streams, self.sublayer, self.weight, self.scale, self.bias, self.gamma]


def draw(rows: int, hidden: int, device: torch.device) -> Given:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    half = torch.bfloat16
    return Given(
        streams=normal(rows, 4, hidden, dtype=half).requires_grad_(),
        sublayer=normal(rows, hidden, dtype=half).requires_grad_(),
        weight=normal(24, 4 * hidden, scale=0.02).requires_grad_(),
        scale=normal(3, scale=0.5).requires_grad_(),
        bias=normal(24, scale=0.1).requires_grad_(),
        gamma=normal(hidden, scale=0.05).add_(1.0).requires_grad_(),
        grad_streams=normal(rows, 4, hidden, dtype=half),
        grad_input=normal(rows, hidden, dtype=half),
    )


def ours(family: str) -> Boundary:
    def run(g: Given) -> tuple[Tensor, Tensor]:
        given, link = boundary_open(
            g.streams, g.weight, g.scale, g.bias, g.gamma, eps=EPS, norm_eps=EPS, contract=family
        )
        return given, boundary_close(link, g.sublayer)

    return run


def transformers_modules(hidden: int, device: torch.device) -> Callable[[Given], Boundary]:
    """The hyper-connection and the norm of transformers, with the post mix as its decoder layer writes it."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as code

    config = DeepseekV4Config(hidden_size=hidden)

    def build(g: Given) -> Boundary:
        connection = code.DeepseekV4HyperConnection(config).to(device)
        norm = code.DeepseekV4RMSNorm(hidden, eps=EPS).to(device)
        del connection.fn, connection.base, connection.scale, norm.weight
        connection.fn, connection.base, connection.scale, norm.weight = g.weight, g.bias, g.scale, g.gamma

        def run(g: Given) -> tuple[Tensor, Tensor]:
            post, comb, collapsed = connection(g.streams[None])
            given = norm(collapsed).to(g.streams.dtype)
            kind = given.dtype
            mixed = torch.matmul(comb.to(kind).transpose(-1, -2), g.streams[None])
            return given[0], (post.to(kind).unsqueeze(-1) * g.sublayer[None].unsqueeze(-2) + mixed)[0]

        return run

    return build


def deepseek_kernels(g: Given) -> tuple[Tensor, Tensor]:
    """TileKernels' pre and post mix with torch's fused norm (in BF16, the only form that is one kernel)."""
    hidden, post, comb = tile_kernels.pre(g.streams, g.weight, g.scale, g.bias, EPS)
    given = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], g.gamma.to(hidden.dtype), EPS)
    (streams,) = tile_kernels.post(g.streams, g.sublayer, comb, post)
    return given, streams


def timed(name: str, boundary: Boundary, g: Given, direction: str, compiled: bool = False) -> Work:
    return work.through_autograd(name, boundary, (g,), g.leaves, (g.grad_input, g.grad_streams), direction, compiled)


def least_bytes(rows: int, hidden: int, direction: str) -> int:
    """Streams, sublayer output and both results once; backward: both gradients in, streams, hidden and sublayer in, two out."""
    parameters = 4 * (24 * 4 * hidden + hidden + 27)
    forward = rows * 2 * hidden * (4 + 1 + 1 + 4) + parameters
    backward = rows * 2 * hidden * (4 + 1 + 4 + 1 + 1 + 4 + 1) + 2 * parameters
    return forward * (direction != "bwd") + backward * (direction != "fwd")


def measure(
    machine: Machine, rows: Sequence[int], hidden: Sequence[int], directions: Sequence[str], peers: bool = True
) -> Iterator[dict[str, Any]]:
    """Result lines, one for each shape, direction and family."""
    here = environment.collect()
    for size in hidden:
        for count in rows:
            for direction in directions:
                g = draw(count, size, machine.device)
                works = [timed(family, ours(family), g, direction) for family in FAMILIES]
                if peers:
                    eager = transformers_modules(size, machine.device)(g)
                    works += [
                        timed("transformers eager", eager, g, direction),
                        timed("transformers compiled", eager, g, direction, compiled=True),
                        timed("TileKernels", deepseek_kernels, g, direction),
                    ]
                moved = least_bytes(count, size, direction)
                works.append(work.device_copy(COPY, machine.device, moved))
                found = machine.measure(works)
                beside = {n: s for n, s in found.items() if n not in FAMILIES}
                head = {"op": OP, "direction": direction, "shape": {"T": count, "D": size}, "dtype": "bfloat16"}
                for family in FAMILIES:
                    named = {**head, "contract": family, "backend": "cuda"}
                    yield results.of_parts(named, found[family], beside, moved, machine, here)
                del g, works, found, beside
                machine.release()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--hidden", type=int, nargs="*", default=list(HIDDEN))
    parser.add_argument("--directions", nargs="*", default=list(DIRECTIONS))
    parser.add_argument("--no-peers", action="store_true")
    given = parser.parse_args()
    results.record(given.out, measure(CudaMachine(), given.rows, given.hidden, given.directions, not given.no_peers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
