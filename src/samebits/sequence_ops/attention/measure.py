"""Times, bits and row invariance of ``attention`` beside its peers: ``python -m samebits.sequence_ops.attention.measure FILE``.

One JSON line per length, direction and contract, with the keys of ``samebits bench``; needs a CUDA device. ``samebits bench`` and
``samebits compare`` drive operators by their declaration, which this one does not have.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.bench.timing import CudaMachine, Failure, Sample
from samebits.bench.work import Run, Work
from samebits.exact.bits import bits
from samebits.sequence_ops.attention import api, contracts
from samebits.sequence_ops.attention.choice import FEW_QUERIES
from samebits.sequence_ops.attention.peers import PEERS, Attention
from samebits.sequence_ops.attention.targets import CUDNN, FLASH, FLASH_DETERMINISTIC, SHAPE, STRETCH, TARGETS

LENGTHS = (1, 16, 64, 264, 925, 3160, 16384)
SAME_BITS_AS = {"cudnn": CUDNN, "fa2": FLASH}
"""The peer whose bits a contract has, where that peer does not leave them."""
TIMED = (CUDNN, FLASH, "efficient")


def invariance(run: Attention, q: Tensor, k: Tensor, v: Tensor) -> dict[str, bool]:
    """Whether the rows of ``run`` keep their bits with fewer queries, fewer heads, in another batch, and in a second run."""
    out = run(q, k, v)
    queries, heads = q.shape[1], q.shape[2]
    half = slice(0, max(1, heads // 2))
    found = {"again": _same(run(q, k, v), out)}
    for rows in (1, 17, 160):
        if rows < queries:
            found[f"last {rows} queries"] = _same(run(q[:, -rows:], k, v), out[:, -rows:])
    if k.shape[2] == heads and heads > 1:
        found["half of the heads"] = _same(run(q[:, :, half], k[:, :, half], v[:, :, half]), out[:, :, half])
    other = [torch.cat([t.flip(1), t]) for t in (q, k, v)]
    found["second in a batch of two"] = _same(run(other[0], other[1], other[2])[1:], out)
    return found


def _tried(ask: Callable[[], Any]) -> Any:
    """The answer, or why there is none: not every library takes every length."""
    try:
        return ask()
    except RuntimeError as error:
        return {"failed": str(error).splitlines()[0]}


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def ours(contract: str) -> Attention:
    return lambda q, k, v: api.attention(q, k, v, contract=contract)[0]


def drawn(length: int, device: torch.device, heads: int, head_dim: int) -> list[Tensor]:
    """q, k, v and an upstream gradient."""
    shape = (1, length, heads, head_dim)
    generator = torch.Generator(device).manual_seed(length)
    return [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(4)]


def _forward_of(name: str, run: Attention, tensors: Sequence[Tensor]) -> Work:
    q, k, v, _ = tensors

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (run(q, k, v),)

    return Work(name, lambda: call)


def _backward_of(name: str, run: Attention, tensors: Sequence[Tensor], deterministic: bool = False) -> Work:
    def prepare() -> Run:
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        out = run(q, k, v)

        def call() -> tuple[Tensor, ...]:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(deterministic)
            try:
                return torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True)
            finally:
                torch.use_deterministic_algorithms(before)

        return call

    return Work(name, prepare)


def _works(direction: str, tensors: Sequence[Tensor]) -> list[Work]:
    runs = {name: ours(name) for name in contracts.RECIPES} | {name: PEERS[name] for name in TIMED}
    if direction == "fwd":
        return [_forward_of(name, run, tensors) for name, run in runs.items()]
    works = [_backward_of(name, run, tensors) for name, run in runs.items()]
    return [*works, _backward_of(FLASH_DETERMINISTIC, PEERS[FLASH], tensors, deterministic=True)]


def rows_of(direction: str, length: int, found: dict[str, Sample | Failure]) -> list[dict[str, Any]]:
    """The line of each contract: its time, its speed, and the ratio of every peer's time to it."""
    flops = (4 if direction == "fwd" else 10) * length * length * math.prod(size for _, size in SHAPE)
    rows = []
    backend = "triton" if length <= FEW_QUERIES else "cuda"  # on Hopper, by default
    for contract in contracts.RECIPES:
        mine = found[contract]
        row: dict[str, Any] = {"op": contracts.NAME, "contract": contract, "backend": backend, "direction": direction}
        row |= {"shape": {"T": length, **dict(SHAPE)}, "dtype": "bfloat16"}
        if isinstance(mine, Failure):
            rows.append(row | {"failed": mine.reason})
            continue
        row |= {"us": mine.us, "us_min": mine.us_min, "us_max": mine.us_max, "tflops": flops / mine.us * 1e-6}
        peers = {}
        for name, theirs in found.items():
            if name not in contracts.RECIPES:
                failed = isinstance(theirs, Failure)
                peers[name] = {"failed": theirs.reason} if failed else {"us": theirs.us, "ratio": theirs.us / mine.us}  # type: ignore[union-attr]
        row["peers"] = peers
        row["targets"] = {
            f"{kind} {target.text}": target.value(row)
            for kind, all_of in (("target", TARGETS), ("stretch", STRETCH))
            for target in all_of
            if target.covers(row)
        }
        rows.append(row)
    return rows


def main(path: Path) -> None:
    machine = CudaMachine()
    heads, head_dim = (size for _, size in SHAPE)
    with path.open("a") as file:
        for length in LENGTHS:
            tensors = drawn(length, machine.device, heads, head_dim)
            q, k, v, _ = tensors
            judged = {"op": contracts.NAME, "shape": {"T": length, **dict(SHAPE)}, "gpu": torch.cuda.get_device_name()}
            judged["torch"] = torch.__version__
            judged["equal"] = {
                name: _tried(lambda: _same(ours(name)(q, k, v), PEERS[peer](q, k, v)))  # noqa: B023
                for name, peer in SAME_BITS_AS.items()
            }
            runs = {name: ours(name) for name in contracts.RECIPES} | {name: PEERS[name] for name in TIMED}
            judged["invariant"] = {
                name: _tried(lambda: invariance(run, q, k, v))  # noqa: B023
                for name, run in runs.items()
            }
            lines = [judged]
            for direction in ("fwd", "bwd"):
                lines += rows_of(direction, length, machine.measure(_works(direction, tensors)))
            for line in lines:
                print(json.dumps(line))
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(
            f"usage: python -m samebits.sequence_ops.attention.measure FILE (JSON lines are appended; got {sys.argv[1:]})"
        )
    main(Path(sys.argv[1]))
