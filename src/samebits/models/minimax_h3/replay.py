"""Replay of the conditioning chain: candidate, peer and golden stage by stage, forward and backward, and what must hold.

*Chained*: a stage fed by its own implementation's stages before it. *Isolated*: the candidate fed by the peer's outputs, so
that a difference is the stage's own. The first stage that differs is named for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from samebits import environment, observers
from samebits.exact.bits import digest
from samebits.models.difference import rows_differing
from samebits.models.minimax_h3 import backward, golden, peer, provider
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.measure import Agreement, Error, agreement, error, repeats, spread
from samebits.models.minimax_h3.rules import Check, check
from samebits.models.minimax_h3.stages import (
    STAGES,
    Arguments,
    Case,
    History,
    Implementation,
    Stage,
    make_case,
)
from samebits.models.minimax_h3.weights import Weights

PEERS = ("diffusers", "provider")
"""The installed diffusers, and the eager replay of it that needs no diffusers."""
KIND = "minimax_h3_conditioning_replay"
ROWS = 8
"""How many rows of each stage are run alone."""


@dataclass(frozen=True)
class RowCheck:
    """Rows that have other bits alone, or in half of the batch, than in the batch."""

    checked: int
    varying: int
    first: int | None
    """The first varying row."""


@dataclass(frozen=True)
class StageResult:
    name: str
    owner: str
    """What ran it, as ``module:function``."""
    contract: str
    launches: tuple[str, ...]
    """Our operators that ran inside, with contract and backend."""
    stand_in: bool
    """The eager provider was bound to it: nothing is promised."""
    promised: bool
    """Isolated, it must have the peer's bits."""
    digest: str
    """SHA-256 of the candidate's chained output; of several outputs, of their digests."""
    repeat: bool
    peer_repeat: bool
    rows: RowCheck
    peer_rows: RowCheck
    chained: Agreement
    isolated: Agreement
    error: Error
    peer_error: Error
    within_tolerance: bool


@dataclass(frozen=True)
class CaseResult:
    num_timesteps: int
    seq_len: int
    layout: str
    seed: int
    stages: tuple[StageResult, ...]
    gradients: backward.Gradients | None

    @property
    def title(self) -> str:
        return f"T = {self.num_timesteps}, S = {self.seq_len}"

    @property
    def first_drift(self) -> str | None:
        """The first stage whose chained bits are not the peer's."""
        return next((stage.name for stage in self.stages if not stage.chained.same), None)

    @property
    def first_isolated_drift(self) -> str | None:
        return next((stage.name for stage in self.stages if not stage.isolated.same), None)


@dataclass(frozen=True)
class Replay:
    model: str
    stage: str
    weights: str
    weights_sha256: str
    geometry: str
    peer: str
    device: str
    environment: dict[str, str]
    candidate: dict[str, str]
    """Stage to what runs it."""
    cases: tuple[CaseResult, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(entry.passed for entry in self.checks)

    def to_json(self) -> dict[str, Any]:
        content = asdict(self) | {"kind": KIND, "passed": self.passed}
        for entry, case in zip(content["cases"], self.cases, strict=True):
            drift = {"first_drift": case.first_drift, "first_isolated_drift": case.first_isolated_drift}
            entry.update(title=case.title, **drift)
        return content


def replay(
    weights: Weights,
    *,
    timesteps: Sequence[int],
    seq_lens: Sequence[int],
    candidate: Candidate | None = None,
    against: str | None = None,
    layout: str = "interleaved",
    seed: int = 0,
    with_backward: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Replay:
    """Every case of T x S on the device of ``weights``.

    Args:
        candidate: what is replayed; our operators by default.
        against: ``"diffusers"`` or ``"provider"``; None takes diffusers where it is installed.
        layout: ``"interleaved"`` or ``"block"``.
        with_backward: the gradients of the timestep embedder and the projection too.
        progress: told (cases done, cases, the case that begins).

    Raises:
        ValueError: an unknown peer or layout, or a layout that cannot have T timesteps in S rows.
        ImportError: diffusers was asked for and is not installed.
    """
    chosen = candidate or Candidate()
    name, implementation = the_peer(against)
    todo = [(t, s) for s in seq_lens for t in timesteps]
    results = []
    with _exact_matmul():
        for done, (t, s) in enumerate(todo):
            progress(done, len(todo), f"T = {t}, S = {s}")
            case = make_case(weights, t, s, seed, layout)
            gradients = backward.gradients(case, chosen, implementation, seed) if with_backward else None
            results.append(CaseResult(t, s, layout, seed, tuple(_stages(case, chosen, implementation)), gradients))
    device = weights["norm_out.norm.weight"].device
    return Replay(
        model="minimax-h3",
        stage="conditioning",
        weights=weights.source,
        weights_sha256=weights.digest(),
        geometry=str(weights.geometry),
        peer=name,
        device=f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
        environment=environment.collect().to_json(),
        candidate={stage.name: chosen.owner(stage.name) for stage in STAGES},
        cases=tuple(results),
        checks=check(results),
    )


def the_peer(against: str | None) -> tuple[str, Implementation]:
    """Its name for records, and what runs its stages."""
    if against is None:
        against = "provider" if peer.missing() else "diffusers"
    if against == "provider":
        return "the eager provider (diffusers not used)", lambda stage: getattr(provider, stage)
    if against != "diffusers":
        raise ValueError(f"peer {against!r}: choose one of {', '.join(PEERS)}")
    why = peer.missing()
    if why is not None:
        raise ImportError(f"diffusers cannot be used: {why}")
    return peer.version(), lambda stage: getattr(peer, stage)


@contextmanager
def _exact_matmul() -> Iterator[None]:
    """FP32 matrix products in FP32: TF32 would make the peer another model."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def _stages(case: Case, candidate: Candidate, theirs: Implementation) -> Iterator[StageResult]:
    judge = golden.Golden(case.dtype)
    own: History = {}
    peers: History = {}
    exact: History = {}
    for stage in STAGES:
        arguments, given = stage.arguments(case, own), stage.arguments(case, peers)
        with _launches() as launches:
            ours = stage.run(candidate, arguments)
        again = stage.run(candidate, arguments)
        expected, expected_again = stage.run(theirs, given), stage.run(theirs, given)
        true = stage.run(lambda name: getattr(judge, name), stage.arguments(case, exact))
        alone = stage.run(candidate, given)
        limit = stage.limit(ours[0].dtype)
        off, peer_off = error(ours, true, limit), error(expected, true, limit)
        yield StageResult(
            name=stage.name,
            owner=candidate.owner(stage.name),
            contract=candidate.contract(stage.name),
            launches=tuple(launches),
            stand_in=candidate.is_stand_in(stage.name),
            promised=case.hidden.device.type in stage.promised_on,
            digest=_digest(ours),
            repeat=repeats(ours, again),
            peer_repeat=repeats(expected, expected_again),
            rows=rows(stage, candidate, arguments, ours),
            peer_rows=rows(stage, theirs, given, expected),
            chained=agreement(ours, expected),
            isolated=agreement(alone, expected),
            error=off,
            peer_error=peer_off,
            within_tolerance=off.within,
        )
        own[stage.name], peers[stage.name], exact[stage.name] = ours, expected, true


@contextmanager
def _launches() -> Iterator[list[str]]:
    """Filled with every launch of an operator, in order."""
    seen: list[str] = []

    def watch(operator: str, backward: bool, tensors: object, results: object, decision: Any) -> None:
        seen.append(f"{operator} {decision.call.contract} {decision.choice.backend}")

    observers.OBSERVERS.append(watch)
    try:
        yield seen
    finally:
        observers.OBSERVERS.remove(watch)


def _digest(outputs: tuple[Tensor, ...]) -> str:
    digests = [digest(value) for value in outputs]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def rows(stage: Stage, implementation: Implementation, arguments: Arguments, whole: tuple[Tensor, ...]) -> RowCheck:
    """Rows spread over the batch run alone, and both halves of it, beside the same rows of ``whole``."""
    count = stage.count(arguments)
    parts = [(row, row + 1) for row in spread(count, ROWS)]
    if count > 2:
        parts += [(0, count // 2), (count // 2, count)]
    varying = torch.zeros(count, dtype=torch.bool)
    for start, stop in parts:
        made = stage.run(implementation, stage.part(arguments, start, stop))
        if len(made) != len(whole):
            varying[start:stop] = True
            continue
        for batch, part in zip(whole, made, strict=True):
            inside = batch.narrow(stage.output_axis, start, stop - start)
            if inside.shape != part.shape or inside.dtype != part.dtype:
                varying[start:stop] = True
                continue
            by_row = [value.movedim(stage.output_axis, 0) for value in (inside, part)]
            varying[start:stop] |= rows_differing(*by_row).cpu()
    checked = len({row for start, stop in parts for row in range(start, stop)})
    found = varying.nonzero().flatten().tolist()
    return RowCheck(checked, len(found), found[0] if found else None)
