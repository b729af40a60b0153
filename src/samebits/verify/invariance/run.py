"""``samebits.invariance``: which module of a model gives a row other bits when the batch around it changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebits.verify.drift import Drift, RowMap, batch_rows, drift, padded_rows, permuted_rows
from samebits.verify.drift.compare import Judged
from samebits.verify.drift.result import side
from samebits.verify.invariance.batches import EXTRA, Batch
from samebits.verify.trace import Trace, trace
from samebits.verify.trace.events import Phase
from samebits.verify.trace.running import runner

CHANGES = ("repeat", "split", "permute", "pad", "pad_sequence")


@dataclass(frozen=True)
class Finding:
    """One change of the batch, against the batch as it was given."""

    change: str
    name: str
    drift: Drift | None
    error: str = ""
    """What the model raised on the changed batch; then there is nothing to compare."""

    @property
    def phases(self) -> dict[Phase, list[Judged]]:
        return {} if self.drift is None else self.drift.phases

    @property
    def first(self) -> Judged | None:
        """The first call that gave a row other bits though its own inputs had the same; forward before backward."""
        return next((j for phase in self.phases if (j := self.first_in(phase)) is not None), None)

    def first_in(self, phase: Phase) -> Judged | None:
        found = None if self.drift is None else self.drift.first(phase)
        return found if found is not None and found.judgement in ("origin", "unclear") else None

    @property
    def compared(self) -> int:
        """Calls of which inputs and outputs could be compared."""
        return sum(j.judgement in ("same", "origin") for judged in self.phases.values() for j in judged)

    @property
    def status(self) -> str:
        """``pass``, ``fail``, ``not comparable`` where no rows of the model's results correspond, or ``error``."""
        if self.error:
            return "error"
        outermost = [j for j in self.phases.get("forward", []) if j.event.kind == "module" and j.event.depth == 0]
        if self.first is not None or any(p.agrees is False for j in outermost for p in j.outputs):
            return "fail"
        results = [p.agrees for j in outermost for p in j.outputs]
        return "pass" if True in results else "not comparable"

    def to_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "change": self.change,
            "name": self.name,
            "status": self.status,
            "error": self.error or None,
            "compared": self.compared,
            "first": None if first is None else first.to_json(),
            "first_backward": None if (j := self.first_in("backward")) is None else j.to_json(),
        }


@dataclass(frozen=True)
class Invariance:
    """What every change of the batch did."""

    model: str
    findings: tuple[Finding, ...]
    reference: Trace

    @property
    def exit_code(self) -> int:
        """0: every change left every row its bits, 1: one did not, 2: one could not be compared and none failed."""
        found = {finding.status for finding in self.findings}
        return 1 if "fail" in found else 0 if found == {"pass"} else 2

    def __getitem__(self, change: str) -> list[Finding]:
        """The findings of one kind of change."""
        return [finding for finding in self.findings if finding.change == change]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "samebits-invariance",
            "version": 1,
            "model": self.model,
            "exit_code": self.exit_code,
            "environment": side(self.reference)["environment"],
            "findings": [finding.to_json() for finding in self.findings],
        }


def invariance(
    model: nn.Module,
    inputs: Any,
    *,
    batch_axis: int = 0,
    sequence_axis: int | None = None,
    shared: Sequence[str] = (),
    only: Sequence[str] = (),
    backward: bool = False,
    modules: str | Sequence[str] = (),
    seed: int = 0,
) -> Invariance:
    """Run a model on a batch and on changed batches, and name for each change the first module that gives a row other bits.

    ``inputs``: a tensor, a tuple of arguments or a mapping of keyword arguments. A tensor has rows if its ``batch_axis`` is as
    long as that of the first one; ``shared`` names the exceptions, as ``0`` or by key. Changes (``only`` picks): ``repeat`` the
    same batch; ``split`` off single rows and the first half; ``permute`` the rows; ``pad`` with other rows; ``pad_sequence``,
    where a ``sequence_axis`` is given, with positions that the model must not look at. ``backward``: the gradients of the sum
    of the outputs too. ``modules``: record only these, by name pattern.

    The random generators are set to ``seed`` before each run; buffers and gradients of the model are left as they were.
    A change that the model raises on is reported as such. Raises ValueError for a batch of fewer than two rows or an unknown
    change, and what the model raises on the batch as given.
    """
    unknown = [change for change in only if change not in CHANGES]
    if unknown:
        raise ValueError(f"unknown change {unknown[0]!r}; choose from {', '.join(CHANGES)}")
    if "pad_sequence" in only and sequence_axis is None:
        raise ValueError("pad_sequence needs to know the sequence axis")
    batch = Batch.of(inputs, batch_axis, shared, backward)
    axes = 2 if sequence_axis is not None and sequence_axis == batch_axis + 1 else 1

    def record(changed: Any) -> Trace:
        run = runner(model, changed, backward)
        options: dict[str, Any] = {"rows": axes, "batch_axis": batch_axis, "modules": modules, "gradients": backward}
        with _as_it_was(model, seed), trace(model, **options) as recording, torch.set_grad_enabled(backward):
            run()
        return recording.trace

    reference = record(batch.take(range(batch.rows)))
    findings = []
    for change, name, make, rows in _changes(batch, sequence_axis):
        if only and change not in only:
            continue
        try:
            found = record(make())
        except Exception as error:  # the model's own; the given batch it accepted
            findings.append(Finding(change, name, None, f"{type(error).__name__}: {' '.join(str(error).split())}"))
        else:
            findings.append(Finding(change, name, drift(reference, found, rows)))
    return Invariance(type(model).__name__, tuple(findings), reference)


def _changes(batch: Batch, sequence_axis: int | None) -> Iterator[tuple[str, str, Callable[[], Any], RowMap | None]]:
    """Kind, name, how the inputs are made, and how the rows correspond."""
    count = batch.rows
    yield "repeat", "the same batch again", lambda: batch.take(range(count)), None
    for row in sorted({0, count // 2, count - 1}):
        yield "split", f"row {row} alone", lambda row=row: batch.take([row]), batch_rows(count, 1, [(row, 0)])  # type: ignore[misc]
    half = max(count // 2, 1)
    if half > 1:
        pairs = [(i, i) for i in range(half)]
        yield "split", f"rows 0 to {half - 1}", lambda: batch.take(range(half)), batch_rows(count, half, pairs)
    order = list(reversed(range(count)))
    yield "permute", "rows in reverse order", lambda: batch.take(order), permuted_rows(order)
    same = [(i, i) for i in range(count)]
    yield "pad", f"{EXTRA} other rows behind", batch.with_others, batch_rows(count, count + EXTRA, same)
    if sequence_axis is not None:
        length = batch.length(sequence_axis)
        rows = padded_rows([length] * count, length, length + EXTRA)
        yield "pad_sequence", f"{EXTRA} positions behind", lambda: batch.with_longer(sequence_axis), rows


@contextlib.contextmanager
def _as_it_was(model: nn.Module, seed: int) -> Iterator[None]:
    """Each run starts from the same random numbers, buffers and empty gradients, and the model is given back unchanged."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
