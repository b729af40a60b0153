"""Qualification of a whole transformer: the real class with our operators beside itself without them, boundary by boundary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits import environment
from samebits.exact.bits import digest
from samebits.models.minimax_h3 import model_backward, model_run, patching, peer
from samebits.models.minimax_h3.check import Check
from samebits.models.minimax_h3.forward import RowCheck
from samebits.models.minimax_h3.measure import Agreement, Error, agreement, error, repeats
from samebits.models.minimax_h3.model_backward import ModelGradients
from samebits.models.minimax_h3.model_rules import check_model
from samebits.models.minimax_h3.model_run import Cost, Made
from samebits.models.minimax_h3.model_source import Source
from samebits.models.minimax_h3.record import Record, device_name, exact_matmul
from samebits.models.minimax_h3.subject import Subject, rows
from samebits.verify.tolerance import tolerance

KIND = "minimax_h3_model_replay"
BATCH = 2
"""Sequences that run together."""


@dataclass(frozen=True)
class Boundary:
    """What one part of the model hands to the next, ours beside the class's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    """SHA-256 of the bytes that the patched model made."""
    peer_digest: str
    repeat: bool
    peer_repeat: bool
    rows: RowCheck
    """Rows that have other bits with their sequence alone, or at another place in the batch."""
    peer_rows: RowCheck
    chained: Agreement
    isolated: Agreement | None
    """The part alone, patched and given what the class's part was given; None where no part is behind the boundary."""
    apart: float | None
    """Largest distance from the class over its largest magnitude."""
    error: Error
    """From the class in FP64, as all below."""
    peer_error: Error
    rms: float | None
    """Root of the mean square of the distance, over that of the golden: what is judged, for the largest distance behind so
    many roundings is the luck of one element."""
    peer_rms: float | None


@dataclass(frozen=True)
class ModelCase:
    title: str
    layout: str
    seq_len: int
    batch: int
    seed: int
    sites: tuple[str, ...]
    unused: tuple[str, ...]
    """Call sites of our operators that the forward did not reach."""
    boundaries: tuple[Boundary, ...]
    restored: bool
    """Whether the model had its own bits once it was unpatched."""
    costs: dict[str, Cost]
    gradients: ModelGradients | None

    @property
    def first_drift(self) -> str | None:
        """The first boundary whose bits are not the class's."""
        return next((at.name for at in self.boundaries if not at.chained.same), None)

    @property
    def first_isolated_drift(self) -> str | None:
        """The first part that gives other bits for the class's own inputs."""
        return next((at.name for at in self.boundaries if at.isolated is not None and not at.isolated.same), None)

    @property
    def first_repeat_drift(self) -> str | None:
        return next((at.name for at in self.boundaries if not at.repeat), None)

    @property
    def first_batch_drift(self) -> str | None:
        return next((at.name for at in self.boundaries if at.rows.varying), None)


@dataclass(frozen=True)
class Qualification(Record):
    """Of a whole model, or of a generation by it."""

    contracts: dict[str, str]
    """Operator to contract."""


def qualified(
    kind: str, stage: str, source: Source, contracts: Mapping[str, str], cases: Sequence[Any], checks: Sequence[Check]
) -> Qualification:
    return Qualification(
        kind=kind,
        model="minimax-h3",
        stage=stage,
        weights=source.weights,
        weights_sha256=source.digest(),
        geometry=source.sizes,
        peer=peer.version(),
        device=device_name(device_of(source)),
        environment=environment.collect().to_json(),
        contracts=dict(contracts),
        cases=tuple(cases),
        checks=tuple(checks),
    )


def device_of(source: Source) -> torch.device:
    return next(source.model.parameters()).device


def replay_model(
    source: Source,
    *,
    layouts: Sequence[str],
    contracts: Mapping[str, str] | None = None,
    backend: str | None = None,
    seed: int = 0,
    with_backward: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Qualification:
    """Every layout with two sequences, on the device of the model, which is left unpatched.

    Args:
        layouts: of ``layouts.NAMED``.
        contracts, backend: as ``samebits.patch`` takes them.
        seed: of the rows and of the upstream gradients.
        with_backward: the gradients of rows and parameters, and what reaches every boundary. Takes eight bytes a parameter
            for FP64, and three times the parameters for gradients.
        progress: told (layouts done, layouts, the layout that begins).

    Raises:
        ValueError: an unknown layout; TypeError, RuntimeError: a model that cannot be patched (see ``samebits.patch``).
    """
    cases = []
    used: dict[str, str] = {}
    with exact_matmul():
        for done, layout in enumerate(layouts):
            progress(done, len(layouts), layout)
            given = rows(source.model.config, layout, BATCH, seed, str(device_of(source)))
            case, used = _case(
                Subject(source.model, given), layout, dict(contracts or {}), backend, seed, with_backward
            )
            cases.append(case)
    return qualified(KIND, "model", source, used, cases, check_model(cases))


def _case(
    subject: Subject, layout: str, contracts: dict[str, str], backend: str | None, seed: int, with_backward: bool
) -> tuple[ModelCase, dict[str, str]]:
    device = subject.inputs["timestep"].device
    gradients = None
    with torch.no_grad():
        theirs = model_run.run(subject)
        peer_repeat = _repeats(theirs.made, model_run.run(subject).made)
        peer_rows = model_run.rows(subject, theirs.made)
        golden = model_run.exact(subject)
    costs = {"unpatched forward": model_run.cost(subject, device)}
    if with_backward:
        upstream = model_backward.upstream(subject, tuple(theirs.made[name] for name in model_run.VELOCITIES), seed)
        true = model_backward.exact(subject, upstream)
        peers = model_backward.side(subject, upstream)
        costs["unpatched forward and backward"] = model_run.cost(
            lambda: model_backward.gradients(subject, upstream), device
        )
    patching.patch(subject.model, contracts, backend=backend)
    try:
        with torch.no_grad():
            ours = model_run.run(subject).made
            report = patching.patched(subject.model)
            repeat = _repeats(ours, model_run.run(subject).made)
            own_rows = model_run.rows(subject, ours)
            parts = model_run.parts(subject.model)
            isolated = {
                name: agreement((parts[name](*arguments),), (theirs.made[name],))
                for name, arguments in theirs.given.items()
            }
        costs["patched forward"] = model_run.cost(subject, device)
        if with_backward:
            gradients = model_backward.compare(model_backward.side(subject, upstream), peers, true)
            costs["patched forward and backward"] = model_run.cost(
                lambda: model_backward.gradients(subject, upstream), device
            )
    finally:
        patching.unpatch(subject.model)
    with torch.no_grad():
        restored = all(_repeats(theirs.made, model_run.run(subject).made).values())
    boundaries = [
        Boundary(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            digest=digest(value),
            peer_digest=digest(theirs.made[name]),
            repeat=repeat[name],
            peer_repeat=peer_repeat[name],
            rows=own_rows[name],
            peer_rows=peer_rows[name],
            chained=agreement((value,), (theirs.made[name],)),
            isolated=isolated.get(name),
            apart=apart(value, theirs.made[name]),
            error=_error(value, golden[name]),
            peer_error=_error(theirs.made[name], golden[name]),
            rms=rms(value, golden[name]),
            peer_rms=rms(theirs.made[name], golden[name]),
        )
        for name, value in ours.items()
    ]
    seq_len = len(subject.inputs["token_tags"])
    case = ModelCase(
        title=f"{layout}, S = {seq_len}",
        layout=layout,
        seq_len=seq_len,
        batch=BATCH,
        seed=seed,
        sites=tuple(site.name for site in report.sites),
        unused=report.unused,
        boundaries=tuple(boundaries),
        restored=restored,
        costs=costs,
        gradients=gradients,
    )
    return case, report.contracts


def _repeats(one: Made, other: Made) -> dict[str, bool]:
    return {name: repeats((value,), (other[name],)) for name, value in one.items()}


def apart(ours: Tensor, theirs: Tensor) -> float | None:
    """Largest distance of two tensors over the second's largest magnitude; None where it is not finite."""
    return error((ours,), (theirs.double(),), tolerance("reduction", ours.dtype, gradient=False)).relative


def rms(value: Tensor, golden: Tensor) -> float | None:
    """Root mean square of the distance from the golden, over the golden's; None where it is not finite."""
    found = float((value.double() - golden).norm() / golden.double().norm())
    return found if math.isfinite(found) else None


def _error(value: Tensor, golden: Tensor) -> Error:
    return error((value,), (golden.double(),), tolerance("reduction", value.dtype, gradient=False))
