"""What a replay found, in a form for JSON; and what every replay does alike: name its peer, keep FP32 products FP32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch

from samebits import environment
from samebits.models.minimax_h3 import peer, provider
from samebits.models.minimax_h3.backward import Gradients
from samebits.models.minimax_h3.block_backward import BlockGradients
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.check import Check
from samebits.models.minimax_h3.controls import Control
from samebits.models.minimax_h3.forward import StageResult
from samebits.models.minimax_h3.measure import Agreement
from samebits.models.minimax_h3.weights import Weights

PEERS = ("diffusers", "provider")
"""The installed diffusers, and the eager replay of it that needs no diffusers."""


@dataclass(frozen=True)
class CaseResult:
    title: str
    num_timesteps: int
    seq_len: int
    layout: str
    seed: int
    stages: tuple[StageResult, ...]
    gradients: Gradients | BlockGradients | None
    controls: tuple[Control, ...] = ()
    patched: Agreement | None = None
    """What the model's own module gave with our operators patched in, beside the last stage; None: nothing was patched."""

    @property
    def first_drift(self) -> str | None:
        """The first stage whose chained bits are not the peer's."""
        return next((stage.name for stage in self.stages if not stage.chained.same), None)

    @property
    def first_isolated_drift(self) -> str | None:
        return next((stage.name for stage in self.stages if not stage.isolated.same), None)

    @property
    def first_repeat_drift(self) -> str | None:
        return next((stage.name for stage in self.stages if not stage.repeat), None)

    @property
    def first_batch_drift(self) -> str | None:
        return next((stage.name for stage in self.stages if stage.rows.varying), None)

    @property
    def first_grad_repeat_drift(self) -> str | None:
        """The first node, in the order of a backward, whose gradient does not repeat; then the first such leaf."""
        if not isinstance(self.gradients, BlockGradients):
            return None
        nodes = [node.name for node in reversed(self.gradients.nodes) if not node.repeat]
        return next(iter([*nodes, *(leaf.name for leaf in self.gradients.leaves if not leaf.repeat)]), None)

    @property
    def first_grad_batch_drift(self) -> str | None:
        """The first node, in that order, whose gradient has other bits beside another sequence in the batch."""
        if not isinstance(self.gradients, BlockGradients):
            return None
        return next((node.name for node in reversed(self.gradients.nodes) if node.beside is False), None)


_FIRSTS = (
    "first_drift", "first_isolated_drift", "first_repeat_drift", "first_batch_drift", "first_grad_repeat_drift",
    "first_grad_batch_drift",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What was run and found, whatever part of the model it was."""

    kind: str
    model: str
    stage: str
    weights: str
    weights_sha256: str
    geometry: str
    peer: str
    device: str
    environment: dict[str, str]
    cases: tuple[Any, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(entry.passed for entry in self.checks)

    def to_json(self) -> dict[str, Any]:
        content = asdict(self) | {"passed": self.passed}
        for entry, case in zip(content["cases"], self.cases, strict=True):
            entry.update({name: getattr(case, name) for name in _FIRSTS if hasattr(case, name)})
        return content


@dataclass(frozen=True)
class Replay(Record):
    cases: tuple[CaseResult, ...]
    candidate: dict[str, str]
    """Stage to what runs it."""


def recorded(
    kind: str,
    weights: Weights,
    candidate: Candidate,
    peer_name: str,
    cases: Sequence[CaseResult],
    checks: Sequence[Check],
) -> Replay:
    device = next(iter(weights.tensors.values())).device
    chain = candidate.chain
    return Replay(
        kind=kind,
        model="minimax-h3",
        stage=chain.name,
        weights=weights.source,
        weights_sha256=weights.digest(),
        geometry=str(weights.geometry),
        peer=peer_name,
        device=device_name(device),
        environment=environment.collect().to_json(),
        candidate={stage.name: candidate.owner(stage.name) for stage in chain.stages},
        cases=tuple(cases),
        checks=tuple(checks),
    )


def device_name(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def the_peer(against: str | None) -> tuple[str, ModuleType]:
    """Its name for records, and the module that has its operators.

    Raises:
        ValueError: neither ``"diffusers"`` nor ``"provider"``; None takes diffusers where it is installed.
        ImportError: diffusers was asked for and cannot be used.
    """
    if against is None:
        against = "provider" if peer.missing() else "diffusers"
    if against == "provider":
        return "the eager provider (diffusers not used)", provider
    if against != "diffusers":
        raise ValueError(f"peer {against!r}: choose one of {', '.join(PEERS)}")
    why = peer.missing()
    if why is not None:
        raise ImportError(f"diffusers cannot be used: {why}")
    return peer.version(), peer


@contextmanager
def exact_matmul() -> Iterator[None]:
    """FP32 matrix products in FP32: TF32 would make the peer another model."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
