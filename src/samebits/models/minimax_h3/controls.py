"""Planted faults: what the replay measures must find each of them, in the same run, on the same inputs.

Each breaks one node of the peer, or of the candidate where the peer itself may vary, and names what has to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.models.minimax_h3.block import BLOCK, BlockCase
from samebits.models.minimax_h3.block_backward import vjp
from samebits.models.minimax_h3.chain import Arguments, History, Implementation, Stage
from samebits.models.minimax_h3.forward import rows
from samebits.models.minimax_h3.measure import agreement, error, repeats

Function = Callable[..., Any]


@dataclass(frozen=True)
class Control:
    """A planted fault, and whether it was noticed."""

    fault: str
    node: str
    notices: str
    found: bool | None
    """None: a measurement, not a fault."""
    detail: str


@dataclass(frozen=True)
class _Bench:
    """One node with the peer's inputs."""

    stage: Stage
    arguments: Arguments
    theirs: Implementation
    judge: Implementation

    def run(self, function: Function) -> tuple[Tensor, ...]:
        return self.stage.run(lambda name: function, self.arguments)


@torch.no_grad()
def controls(case: BlockCase, history: History, theirs: Implementation, judge: Implementation) -> tuple[Control, ...]:
    """All of them; ``history`` is what the peer made of every node."""
    nodes = {stage.name: stage for stage in BLOCK.stages}

    def bench(name: str) -> _Bench:
        return _Bench(nodes[name], nodes[name].arguments(case, history), theirs, judge)

    return (
        _one_bit(bench("k_norm")),
        _moved_row(bench("rope_q")),
        _batch(bench("residual_attn")),
        _neighbour(bench("residual_mlp")),
        _repeat(bench("norm2")),
        _far(bench("o_proj")),
        _gradient(bench("swiglu"), history["swiglu"][0]),
        _permuted(bench("attention")),
    )


def _one_bit(at: _Bench) -> Control:
    """The last bit of one element."""
    honest = at.theirs(at.stage.name)

    def faulty(**arguments: Any) -> Tensor:
        made: Tensor = honest(**arguments).clone()
        made.view(-1)[made.numel() // 2 : made.numel() // 2 + 1].view(_INTEGER[made.element_size()]).bitwise_xor_(1)
        return made

    seen = agreement(at.run(faulty), at.run(honest))
    return _found(
        "the last bit of one element", at, "agreement of bits", not seen.same and seen.differing == 1, seen.first
    )


def _moved_row(at: _Bench) -> Control:
    """The cosines and sines of one position are off."""
    row = at.arguments["cos"].shape[0] // 2
    moved = {name: at.arguments[name].clone() for name in ("cos", "sin")}
    for table in moved.values():
        table[row] = table[row] + 0.25
    made, honest = (at.stage.run(at.theirs, given)[0] for given in (at.arguments | moved, at.arguments))
    differing = (made != honest).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    found = differing == [row]
    return _found("the angles of one position", at, "agreement of bits, at that row alone", found, f"rows {differing}")


def _batch(at: _Bench) -> Control:
    """A row alone takes another way than a row among others."""
    honest = at.theirs(at.stage.name)

    def faulty(residual: Tensor, **rest: Any) -> Tensor:
        made: Tensor = honest(residual=residual, **rest)
        return made * (1 + 2.0**-7) if residual.shape[1] == 1 else made

    seen = rows(at.stage, lambda name: faulty, at.arguments, at.run(faulty))
    return _found("a row alone is computed otherwise", at, "rows alone", seen.varying > 0, f"{seen.varying} rows vary")


def _neighbour(at: _Bench) -> Control:
    """Sequences of a batch leak into one another."""
    honest = at.theirs(at.stage.name)

    def faulty(residual: Tensor, **rest: Any) -> Tensor:
        made: Tensor = honest(residual=residual, **rest)
        return made + made.roll(1, 0) if residual.shape[0] > 1 else made

    seen = rows(at.stage, lambda name: faulty, at.arguments, at.run(faulty))
    fault = "another sequence in the batch is added"
    return _found(fault, at, "rows beside another sequence", seen.varying > 0, f"{seen.varying} rows vary")


def _repeat(at: _Bench) -> Control:
    honest = at.theirs(at.stage.name)
    calls: list[None] = []

    def faulty(**arguments: Any) -> Tensor:
        calls.append(None)
        made: Tensor = honest(**arguments) * (1 + 2.0**-7 * (len(calls) % 2))
        return made

    found = not repeats(at.run(faulty), at.run(faulty))
    return _found("every second call is scaled by 1 + 2^-7", at, "repeats", found, "")


def _far(at: _Bench) -> Control:
    """An early rounding of the weight to 5 bits, as a quantised GEMM has it."""
    honest = at.theirs(at.stage.name)

    def faulty(x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = honest(x=x, weight=weight.to(torch.float8_e5m2).to(weight.dtype))
        return made

    true = at.stage.run(at.judge, at.arguments)
    limit = at.stage.limit(true[0].dtype)
    off, peers = error(at.run(faulty), true, limit), error(at.run(honest), true, limit)
    return _found(
        "a weight of 8 bits", at, "distance from the golden", not BLOCK.close(off, peers), f"{off.relative:.2g}"
    )


def _gradient(at: _Bench, output: Tensor) -> Control:
    """The gradient of the activation is forgotten."""
    honest = at.theirs(at.stage.name)

    def faulty(x: Tensor) -> Tensor:
        made: Tensor = honest(x=torch.cat((x.chunk(2, -1)[0], x.chunk(2, -1)[1].detach()), -1))
        return made

    upstream = torch.ones_like(output)
    wrong = vjp(at.stage, lambda name: faulty, at.arguments, upstream)["x"]
    seen = agreement((wrong,), (vjp(at.stage, at.theirs, at.arguments, upstream)["x"],))
    return _found("no gradient of the activation", at, "agreement of gradients", not seen.same, seen.first)


def _permuted(at: _Bench) -> Control:
    """Keys are summed in packed order, so that another order of the rows may have other bits. Not a fault."""
    order = torch.randperm(at.arguments["q"].shape[1], generator=torch.Generator().manual_seed(0))
    order = order.to(at.arguments["q"].device)
    shuffled = {name: value[:, order].contiguous() for name, value in at.arguments.items()}
    (made,), (straight,) = at.stage.run(at.theirs, shuffled), at.stage.run(at.theirs, at.arguments)
    differing = int((made != straight[:, order]).flatten(2).any(-1).sum())
    detail = f"{differing} of {order.numel()} rows have other bits"
    return Control("the packed rows in another order", at.stage.name, "measured only", None, detail)


def _found(fault: str, at: _Bench, notices: str, found: bool, detail: str) -> Control:
    return Control(fault, at.stage.name, notices, found, detail)


_INTEGER = {2: torch.int16, 4: torch.int32}
