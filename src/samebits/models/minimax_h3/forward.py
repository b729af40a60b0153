"""The forward of a chain: candidate, peer and golden stage by stage.

*Chained*: a stage fed by its own implementation's stages before it. *Isolated*: the candidate fed by the peer's outputs, so
that a difference is the stage's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits import observers
from samebits.exact.bits import digest
from samebits.models.difference import rows_differing
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.chain import Arguments, Chain, History, Implementation, Outputs, Stage
from samebits.models.minimax_h3.latency import Clock, Latency
from samebits.models.minimax_h3.measure import Agreement, Error, agreement, error, repeats, spread

ROWS = 8
"""How many rows of each stage are run alone."""


@dataclass(frozen=True)
class RowCheck:
    """Rows that have other bits alone, in half of the rows or beside another sequence, than among all rows."""

    checked: int
    varying: int
    first: int | None
    """The first varying row."""
    alone: int = 0
    """Rows that ran alone, of those that were checked."""
    alone_varying: int = 0
    """Of these."""


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
    """Close enough to the golden, by the rule of the chain."""
    whole: bool | None = None
    """Whether the peer's own module, run whole, had the bits of its part here; None: nothing was run whole."""
    latency_us: Latency | None = None
    """Of the isolated execution, forward; None: nothing was timed."""


@torch.no_grad()
def stages(
    chain: Chain,
    case: Any,
    candidate: Candidate,
    theirs: Implementation,
    judge: Implementation,
    whole: Mapping[str, Outputs] | None = None,
    clock: Clock | None = None,
) -> tuple[tuple[StageResult, ...], History, History]:
    """Every stage of a case, what the candidate made of each, and what the peer did.

    Args:
        case: what the stages of the chain take their arguments from, with a ``hidden`` on the device of the run.
        theirs, judge: the peer and the golden.
        whole: what the peer's module made of each stage when it ran as one.
        clock: what times each stage.
    """
    own: History = {}
    peers: History = {}
    exact: History = {}
    found = []
    for stage in chain.stages:
        arguments, given = stage.arguments(case, own), stage.arguments(case, peers)
        with _launches() as launches:
            ours = stage.run(candidate, arguments)
        again = stage.run(candidate, arguments)
        expected, expected_again = stage.run(theirs, given), stage.run(theirs, given)
        true = stage.run(judge, stage.arguments(case, exact))
        alone = stage.run(candidate, given)
        limit = stage.limit(ours[0].dtype)
        off, peer_off = error(ours, true, limit), error(expected, true, limit)
        found.append(
            StageResult(
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
                within_tolerance=chain.close(off, peer_off),
                whole=None if whole is None else repeats(whole[stage.name], expected),
                latency_us=None if clock is None else clock(chain, stage, candidate, given),
            )
        )
        own[stage.name], peers[stage.name], exact[stage.name] = ours, expected, true
    return tuple(found), own, peers


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


def rows(stage: Stage, implementation: Implementation, arguments: Arguments, whole: Outputs) -> RowCheck:
    """Rows spread over the batch run alone, both halves of it, and all of it beside another sequence, as in ``whole``?"""
    count = stage.count(arguments)
    varying = torch.zeros(count, dtype=torch.bool)
    alone = spread(count, ROWS)
    parts = [(row, row + 1) for row in alone]
    if count > 2:
        parts += [(0, count // 2), (count // 2, count)]
    alone_varying = 0
    for at, (start, stop) in enumerate(parts):
        made = stage.run(implementation, stage.part(arguments, start, stop))
        inside = tuple(batch.narrow(stage.output_axis, start, stop - start) for batch in whole)
        differing = _differing(stage, inside, made, stop - start)
        varying[start:stop] |= differing
        alone_varying += int(differing.sum()) if at < len(alone) else 0
    for first in (False, True) if stage.batch else ():
        joined = stage.run(implementation, stage.beside(arguments, first))
        half = joined[0].shape[0] // 2
        made = tuple(batch.narrow(0, half if first else 0, half) for batch in joined)
        varying |= _differing(stage, whole, made, count)
    checked = count if stage.batch else len({row for start, stop in parts for row in range(start, stop)})
    found = varying.nonzero().flatten().tolist()
    return RowCheck(checked, len(found), found[0] if found else None, len(alone), alone_varying)


def _differing(stage: Stage, expected: Outputs, made: Outputs, count: int) -> Tensor:
    """(count,) on the CPU: the rows of which any output differs; all, where the outputs cannot be compared."""
    varying = torch.zeros(count, dtype=torch.bool)
    if [(v.shape, v.dtype) for v in made] != [(v.shape, v.dtype) for v in expected]:
        return ~varying
    for one, other in zip(expected, made, strict=True):
        varying |= rows_differing(*(value.movedim(stage.output_axis, 0) for value in (one, other))).cpu()
    return varying
