"""What is compared: a callable for an operator, ours or a peer's, run on the same batch in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samebits.bench.peers import Peer
from samebits.checks import DTYPES
from samebits.contract import OpSpec
from samebits.operator import Operator
from samebits.verify.operators import CandidateSubject
from samebits.verify.subject import Batch


@dataclass(frozen=True)
class Found:
    """What one run gave, by name: results under theirs, gradients under ``grad_<input>``."""

    values: dict[str, Tensor]
    miscounted: tuple[str, ...] = ()
    """Results or gradients too many or too few, in words. Any of it is a difference."""


@dataclass(frozen=True)
class Contestant:
    """``function`` takes the forward inputs in order, without derived ones, then the scalars."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    scalars: tuple[float, ...]
    returned: tuple[str, ...]
    """What the function returns, in order."""
    outputs: tuple[str, ...]
    """The part of it that is compared, and behind which gradients are taken."""
    gradients: tuple[str, ...]
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)

    def run(self, batch: Batch) -> Found:
        """Results and gradients of one call. The inputs are copies, so that nobody can change another one's."""
        known = batch.rows | batch.shared
        leaves = {name: self._leaf(name, known[name]) for name in self.inputs}
        with torch.set_grad_enabled(bool(self.gradients)):
            raw = self.function(*leaves.values(), *self.scalars)
        results = (raw,) if isinstance(raw, Tensor) else tuple(raw)
        miscounted = []
        if len(results) != len(self.returned):
            miscounted.append(f"{len(results)} results instead of {len(self.returned)} ({', '.join(self.returned)})")
        named = dict(zip(self.returned, results, strict=False))
        named = {name: named[name] for name in self.outputs if name in named}
        values = {name: value.detach() for name, value in named.items()}
        if self.gradients:
            grads = self._pulled_back(named, leaves, batch.upstream)
            absent = [name for name, grad in grads.items() if grad is None]
            miscounted += [f"no gradient of {name}" for name in absent]
            values |= {f"grad_{name}": grad for name, grad in grads.items() if grad is not None}
        return Found(values, tuple(miscounted))

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        fresh = tensor.detach().to(self.casts.get(name, tensor.dtype), copy=True)
        return fresh.requires_grad_(name in self.gradients)

    def _pulled_back(
        self, results: dict[str, Tensor], leaves: dict[str, Tensor], upstream: dict[str, Tensor]
    ) -> dict[str, Tensor | None]:
        reached = [name for name in results if results[name].requires_grad]
        if not reached:
            raise RuntimeError("its results do not require a gradient although its inputs do")
        grads = torch.autograd.grad(
            [results[name] for name in reached],
            [leaves[name] for name in self.gradients],
            [upstream[name].to(results[name].dtype) for name in reached],
            allow_unused=True,
        )
        return dict(zip(self.gradients, grads, strict=True))


class Problem(CandidateSubject):
    """The inputs of a comparison and their golden: drawn as for ``samebits check``, upstream in the dtype of the result."""

    def __init__(
        self,
        op: Operator,
        contract: str,
        backend: str | None,
        device: torch.device,
        rows: int,
        seed: int,
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(
            ours(op, contract, backend), f"{contract} of samebits", True, name=op.name, contract=contract,
            backend=backend, device=device, dtype=None, rows=rows, seed=seed, sizes=sizes,
        )  # fmt: skip

    def drawn(self, ids: range) -> Batch:
        """A batch of any size: the drawn rows, again and again."""
        return self.batch([row % self.rows for row in ids])

    def judge(self, rows: int, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """FP64 values of these results and of the gradients behind them."""
        batch = self.batch(range(rows))
        upstream = {n: t if n in outputs else torch.zeros_like(t) for n, t in batch.upstream.items()}
        forward = self.golden(batch, False)
        behind = self.golden(Batch(batch.ids, batch.rows, batch.shared, upstream), True)
        return {name: forward[name] for name in outputs} | {f"grad_{name}": value for name, value in behind.items()}

    def per_row(self, name: str) -> bool:
        """Whether the first axis of this result or gradient is the batch."""
        if not name.startswith("grad_"):
            return self.is_row(name, False)
        leaf = name.removeprefix("grad_")
        joined = dict(self.spec.through)
        return self.is_row(joined[leaf], False) if leaf in joined else self.is_row(leaf, True)


def ours(op: Operator, contract: str, backend: str | None) -> Callable[..., tuple[Tensor, ...]]:
    """The public results of our operator, through autograd. It makes derived inputs itself, as for a caller who has none."""
    spec = op.spec
    given = _inputs(spec)
    names = (*given, *(scalar.name for scalar in spec.scalars))

    def function(*values: Any, **keywords: float) -> tuple[Tensor, ...]:
        known = dict(zip(names, values, strict=False)) | keywords
        tensors = [known.pop(arg.name, None) for arg in spec.forward.inputs]
        results = op.forward(*tensors, contract=contract, backend=backend, **known)
        return tuple(r for r, declared in zip(results, spec.forward.results, strict=True) if not declared.hidden)

    return function


def our_contestant(op: Operator, contract: str, backend: str | None, name: str) -> Contestant:
    spec = op.spec
    public = tuple(r.name for r in spec.forward.results if not r.hidden)
    function = ours(op, contract, backend)
    return Contestant(name, function, _inputs(spec), _scalars(spec), public, public, spec.learned)


def peer_contestant(spec: OpSpec, peer: Peer) -> Contestant:
    """A compiled peer is compiled once, as users do, and again where torch.compile finds that its shapes change."""
    function = peer.run
    if peer.compiled:
        torch._dynamo.reset()
        function = torch.compile(peer.run, fullgraph=True)
    shown = peer.results(spec)
    leaves = tuple(name for name in spec.learned if peer.gradients is None or name in peer.gradients)
    casts = {name: DTYPES[dtype] for name, dtype in peer.cast}
    return Contestant(peer.name, function, _inputs(spec), _scalars(spec), shown, shown, leaves, casts)


def _inputs(spec: OpSpec) -> tuple[str, ...]:
    return tuple(arg.name for arg in spec.forward.inputs if not arg.derived)


def _scalars(spec: OpSpec) -> tuple[float, ...]:
    return tuple(scalar.default for scalar in spec.scalars)
