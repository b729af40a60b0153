"""Gradients of a block: of its inputs and parameters, and what reaches every node, ours beside the peer's own autograd.

*Chained*: our forward and backward throughout. *Isolated*: one node's backward by ours and by the peer, both given the
peer's forward values and the gradient that reached that node in the peer's run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.dispatch import UnsupportedError
from samebits.models.minimax_h3.block import BLOCK, CONSTANTS, OUTPUT, PREFIX, BlockCase
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.chain import Arguments, History, Implementation, Outputs, Stage, StageError
from samebits.models.minimax_h3.measure import Agreement, Error, agreement, error, repeats
from samebits.verify.tolerance import tolerance

INPUTS = ("hidden", "temb")
PARAMETERS = (
    "norm1.weight", "attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight", "attn.norm_q.weight",
    "attn.norm_k.weight", "attn.to_out.0.weight", "norm2.weight", "ff.net.0.proj.weight", "ff.net.2.weight",
    "adaln_proj.linear.weight", "adaln_proj.linear.bias",
)  # fmt: skip
LEAVES = (*INPUTS, *PARAMETERS)
NODES = tuple(stage.name for stage in BLOCK.stages)
Runner = Callable[[BlockCase], History]


@dataclass(frozen=True)
class BlockLeaf:
    """The gradient of one input or parameter."""

    name: str
    dtype: str
    golden_absmax: float
    repeat: bool
    peer_repeat: bool
    chained: Agreement
    """Bits beside the peer's gradient."""
    error: Error
    peer_error: Error

    @property
    def closer(self) -> bool:
        """Not further from the golden than the peer."""
        ours, theirs = self.error.relative, self.peer_error.relative
        return ours is not None and (theirs is None or ours <= theirs)


@dataclass(frozen=True)
class NodeGradient:
    """The gradient that reaches a node's output, and the node's own backward."""

    name: str
    stand_in: bool
    repeat: bool
    peer_repeat: bool
    beside: bool | None
    """Whether it has the same bits with another sequence in the batch; None for what all rows share."""
    peer_beside: bool | None
    chained: Agreement
    isolated: dict[str, Agreement]
    """By argument: the node's backward beside the peer's, on the peer's values."""


@dataclass(frozen=True)
class BlockGradients:
    leaves: tuple[BlockLeaf, ...]
    nodes: tuple[NodeGradient, ...]
    patched: Agreement | None
    """All leaves of the patched block beside those of its nodes one by one; None: nothing was patched."""


def block_gradients(
    case: BlockCase,
    candidate: Candidate,
    theirs: Implementation,
    judge: Implementation,
    whole: Runner | None,
    patched: Runner | None,
    seed: int,
) -> BlockGradients:
    """Every gradient twice, and once more with a second sequence in the batch.

    Args:
        theirs, judge: what runs a node of the peer and of the golden.
        whole: runs the peer's block as one; None: node by node.
        patched: runs the block with our operators patched in.
        seed: of the upstream gradient, which comes from torch's CPU generator.
    """
    drawn = torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(seed + 1))
    upstream = drawn.to(case.hidden.device, case.dtype)
    runners = {"ours": lambda one: chained(one, candidate), "the peer's": whole or (lambda one: chained(one, theirs))}
    runs = {mode: _twice(mode, case, runner, upstream) for mode, runner in runners.items()}
    first, again, _ = runs["ours"]
    peers, peers_again, _ = runs["the peer's"]
    exact = run(_exact(case), lambda one: chained(one, judge), upstream.double())[1]
    leaves = [_leaf(n, first[n], again[n], peers[n], peers_again[n], exact[n]) for n in LEAVES]
    del exact
    nodes = _nodes(case, candidate, theirs, runs, upstream)
    beside = None
    if patched is not None:
        made = run(case, patched, upstream)[1]
        beside = agreement(tuple(made[name] for name in LEAVES), tuple(first[name] for name in LEAVES))
    return BlockGradients(tuple(leaves), tuple(nodes), beside)


Gradients = Mapping[str, Tensor]
"""By leaf, and by node: what reaches its output."""


def _twice(mode: str, case: BlockCase, runner: Runner, upstream: Tensor) -> tuple[Gradients, Gradients, Gradients]:
    try:
        one, other = (run(case, runner, upstream)[1] for _ in range(2))
        joined = replace(case, hidden=torch.cat((case.hidden.flip(1), case.hidden)))
        return one, other, run(joined, runner, torch.cat((upstream.flip(1), upstream)))[1]
    except (StageError, UnsupportedError):
        raise
    except Exception as failure:
        raise StageError(f"gradients, {mode}: {type(failure).__name__}: {failure}") from failure


def run(case: BlockCase, runner: Runner, upstream: Tensor) -> tuple[History, Gradients]:
    tensors = {name: getattr(case, name) for name in INPUTS} | {name: case.parameter(name) for name in PARAMETERS}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    parameters = {PREFIX + name: leaves[name] for name in PARAMETERS}
    weights = replace(case.weights, tensors={**case.weights.tensors, **parameters})
    given = replace(case, weights=weights, hidden=leaves["hidden"], temb=leaves["temb"])
    with torch.enable_grad():
        history = runner(given)
    reached = {name: outputs[0] for name, outputs in history.items() if name != OUTPUT}
    wanted = [*leaves.values(), *reached.values()]
    found = torch.autograd.grad(history[OUTPUT][0], wanted, upstream.to(history[OUTPUT][0].dtype))
    values = {name: tuple(value.detach() for value in outputs) for name, outputs in history.items()}
    return values, dict(zip((*leaves, *reached), found, strict=True)) | {OUTPUT: upstream}


def chained(case: BlockCase, implementation: Implementation) -> History:
    history: History = {}
    for stage in BLOCK.stages:
        history[stage.name] = stage.run(implementation, stage.arguments(case, history))
    return history


def _exact(case: BlockCase) -> BlockCase:
    """The same numbers in FP64."""
    tensors = {name: tensor.double() for name, tensor in case.weights.tensors.items()}
    weights = replace(case.weights, tensors=tensors)
    return replace(case, weights=weights, hidden=case.hidden.double(), temb=case.temb.double())


def _leaf(name: str, ours: Tensor, again: Tensor, peers: Tensor, peers_again: Tensor, exact: Tensor) -> BlockLeaf:
    limit = tolerance("reduction", ours.dtype, gradient=True)
    return BlockLeaf(
        name=name,
        dtype=str(ours.dtype).removeprefix("torch."),
        golden_absmax=float(exact.abs().max()),
        repeat=repeats((ours,), (again,)),
        peer_repeat=repeats((peers,), (peers_again,)),
        chained=agreement((ours,), (peers,)),
        error=error((ours,), (exact,), limit),
        peer_error=error((peers,), (exact,), limit),
    )


def _nodes(
    case: BlockCase,
    candidate: Candidate,
    theirs: Implementation,
    runs: Mapping[str, tuple[Gradients, Gradients, Gradients]],
    upstream: Tensor,
) -> list[NodeGradient]:
    (first, again, beside), (peers, peers_again, peers_beside) = runs["ours"], runs["the peer's"]
    with torch.no_grad():
        history = chained(case, theirs)
    found = []
    for stage in BLOCK.stages:
        name = stage.name
        found.append(
            NodeGradient(
                name=name,
                stand_in=candidate.is_stand_in(name),
                repeat=repeats((first[name],), (again[name],)),
                peer_repeat=repeats((peers[name],), (peers_again[name],)),
                beside=_last(first[name], beside[name]) if stage.batch else None,
                peer_beside=_last(peers[name], peers_beside[name]) if stage.batch else None,
                chained=agreement((first[name],), (peers[name],)),
                isolated=_isolated(stage, stage.arguments(case, history), candidate, theirs, peers[name]),
            )
        )
    return found


def _last(alone: Tensor, joined: Tensor) -> bool:
    """Whether the last sequence of the joined batch has the bits of the one that was alone."""
    return repeats((alone,), (joined[-alone.shape[0] :],))


def _isolated(
    stage: Stage, arguments: Arguments, candidate: Candidate, theirs: Implementation, upstream: Tensor
) -> dict[str, Agreement]:
    ours, peers = (vjp(stage, implementation, arguments, upstream) for implementation in (candidate, theirs))
    return {name: agreement((ours[name],), (peers[name],)) for name in ours}


def vjp(stage: Stage, implementation: Implementation, arguments: Arguments, upstream: Tensor) -> dict[str, Tensor]:
    """By argument: the gradient of one node for the gradient of its output."""
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and name not in CONSTANTS
    }
    with torch.enable_grad():
        outputs: Outputs = stage.run(implementation, arguments | leaves)
    found = torch.autograd.grad(outputs[0], list(leaves.values()), upstream)
    return dict(zip(leaves, found, strict=True))


def ulp(largest: float) -> float:
    """The distance of BF16 numbers of this magnitude."""
    return 2.0 ** (math.floor(math.log2(largest)) - 7) if largest > 0 else 0.0
