"""Runs the checks of one subject.

Invariance compares the candidate with itself, so it always stands beside accuracy, which an independent golden judges:
a wrong operator can be perfectly invariant.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits import dispatch
from samebits.exact.compare import first_difference
from samebits.verify.operators import CandidateSubject, OperatorSubject
from samebits.verify.report import CheckResult, Failure
from samebits.verify.subject import Batch, NotRun, Subject, first_line, positions
from samebits.verify.tolerance import judge
from samebits.verify.variations import AXES, variations

REPEATS_OF_A_PLAN = (1, 17)
"""Batch sizes, beside the whole batch, on which every launch plan runs."""


class Comparisons:
    """Collects what differs along the axes of one check."""

    def __init__(self, payloads: bool, reproduce: Callable[[str], str]) -> None:
        self.payloads, self.reproduce = payloads, reproduce
        self.count = 0
        self.seen: dict[str, set[str]] = {}
        self.failures: dict[tuple[str, str], Failure] = {}

    def compare(self, axis: str, label: str, result: str, left: Tensor, right: Tensor) -> None:
        self.count += 1
        self.seen.setdefault(axis, set()).add(label)
        try:
            difference = first_difference(left, right, payloads=self.payloads)
        except ValueError as error:
            self.broke(axis, label, result, str(error), {})
            return
        if difference is not None:
            self.broke(axis, label, result, str(difference), dataclasses.asdict(difference))

    def broke(self, axis: str, label: str, result: str, what: str, evidence: dict[str, Any]) -> None:
        self.seen.setdefault(axis, set()).add(label)
        first = self.failures.get((axis, result))
        if first is None:
            self.failures[axis, result] = Failure(axis, label, result, what, self.reproduce(axis), evidence)
        else:
            self.failures[axis, result] = dataclasses.replace(first, also=first.also + 1)

    def result(self, name: str, notes: Sequence[str] = ()) -> CheckResult:
        failures = tuple(self.failures.values())
        if failures:
            broken = {f.axis: f.label for f in reversed(failures)}
            summary = "not the same bits along " + "; ".join(
                f"{axis} ({label})" for axis, label in reversed(broken.items())
            )
        elif not self.count:
            return CheckResult(name, "n/a", "none of the axes asked for applies here", notes=tuple(notes))
        else:
            listed = ", ".join(f"{axis} {len(labels)}" for axis, labels in self.seen.items())
            summary = f"same bits in {self.count} comparisons over {listed}"
        return CheckResult(name, "fail" if failures else "pass", summary, self.count, failures, tuple(notes))


class Examination:
    """Runs the checks of one subject."""

    def __init__(self, subject: Subject, only: tuple[str, ...], forward_only: bool, command: list[str]) -> None:
        self.subject, self.only, self.forward_only, self.command = subject, only, forward_only, command
        self.axes = tuple(axis for axis in AXES if not only or axis in only)
        self.canonical = subject.batch(range(subject.rows))

    def run(self) -> tuple[CheckResult, ...]:
        return (
            self._guarded("forward_accuracy", "accuracy", lambda: self._accuracy(False)),
            self._guarded("forward_invariance", None, lambda: self._invariance(False)),
            self._guarded("gradient_accuracy", "accuracy", lambda: self._accuracy(True)),
            self._guarded("gradient_invariance", None, lambda: self._invariance(True)),
            self._guarded("reference_bits", "reference", self._reference_bits),
        )

    def _guarded(self, name: str, question: str | None, run: Callable[[], CheckResult]) -> CheckResult:
        if self.forward_only and name.startswith("gradient"):
            return CheckResult(name, "n/a", "left out: forward only")
        if self.only and (question not in self.only if question else not self.axes):
            return CheckResult(name, "n/a", f"left out: only {', '.join(self.only)}")
        try:
            return run()
        except NotRun as reason:
            return CheckResult(name, "not run", str(reason))

    def _reproduce(self, gradient: bool) -> Callable[[str], str]:
        extra = [] if gradient else ["--forward-only"]
        return lambda axis: shlex.join([*self.command, "--only", axis, *extra])

    def _candidate(self, gradient: bool) -> Callable[[Batch], dict[str, Tensor]]:
        return self.subject.backward if gradient else self.subject.forward

    # --- accuracy -------------------------------------------------------------------------------------------------

    def _accuracy(self, gradient: bool) -> CheckResult:
        name = "gradient_accuracy" if gradient else "forward_accuracy"
        try:
            values = self._candidate(gradient)(self.canonical)
        except NotRun:
            raise
        except Exception as error:
            raise NotRun(f"the candidate raised {type(error).__name__}: {first_line(error)}") from error
        golden = self.subject.golden(self.canonical, gradient)
        reproduce = self._reproduce(gradient)("accuracy")
        failures: list[Failure] = []
        worst: dict[str, float] = {}
        for result, exact in golden.items():
            if result not in values:
                what = "the candidate gives none, the golden has one"
                failures.append(Failure("accuracy", "against the golden", result, what, reproduce, {}))
                continue
            limit = self.subject.tolerance(result, values[result].dtype, gradient)
            try:
                worst[result], excess = judge(values[result], exact, limit)
            except ValueError as error:
                failures.append(Failure("accuracy", "against the golden", result, str(error), reproduce, {}))
                continue
            if excess is not None:
                evidence = dataclasses.asdict(excess)
                failures.append(Failure("accuracy", f"tolerance {limit}", result, str(excess), reproduce, evidence))
        if failures:
            summary = "; ".join(f"{f.result}: {f.what}" for f in failures)
        else:
            summary = "error as a fraction of the tolerance: " + ", ".join(f"{n} {v:.2g}" for n, v in worst.items())
        return CheckResult(name, "fail" if failures else "pass", summary, len(golden), tuple(failures))

    # --- invariance -----------------------------------------------------------------------------------------------

    def _invariance(self, gradient: bool) -> CheckResult:
        subject, run = self.subject, self._candidate(gradient)
        found = Comparisons(not subject.canonical_nans, self._reproduce(gradient))
        try:
            base = run(self.canonical)
        except NotRun:
            raise
        except Exception as error:
            raise NotRun(f"the candidate raised {type(error).__name__}: {first_line(error)}") from error
        rowwise = [name for name in base if subject.is_row(name, gradient)]
        shared = [name for name in base if name not in rowwise]
        fold = Fold(shared) if gradient and subject.promises_fold and "fold" in self.axes else None
        axes = self.axes if fold is None else tuple({*self.axes, "single"})
        for variation in variations(subject.rows, axes):
            restored = {name: base[name].clone() for name in rowwise}
            try:
                for part in variation.parts:
                    results = run(subject.batch(part.ids))
                    keep = positions(part.keep, subject.device)
                    rows = positions([part.ids[k] for k in part.keep], subject.device)
                    for name in rowwise:
                        restored[name][rows] = results[name][keep]
                    if variation.axis == "repeat":
                        for name in shared:
                            found.compare("repeat", variation.label, name, results[name], base[name])
                    if variation.axis == "single" and fold is not None:
                        fold.add(results)
            except Exception as error:
                what = f"raised {type(error).__name__}: {first_line(error)}"
                found.broke(variation.axis, variation.label, ", ".join(rowwise), what, {})
                fold = None
                continue
            if variation.axis in self.axes:
                for name in rowwise:
                    found.compare(variation.axis, variation.label, name, restored[name], base[name])
        if fold is not None:
            label = "gradients of single rows, folded in ascending order, vs the batch"
            for name, total in fold.totals.items():
                found.compare("fold", label, name, total, base[name])
        if "plan" in self.axes:
            self._plans(gradient, found)
        if "autograd" in self.axes and gradient:
            both = subject.autograd(self.canonical)
            for name, explicit in (both[1] if both is not None else {}).items():
                assert both is not None
                found.compare("autograd", "autograd vs the explicit backward", name, both[0][name], explicit)
        return found.result("gradient_invariance" if gradient else "forward_invariance", self._notes(gradient, shared))

    def _plans(self, gradient: bool, found: Comparisons) -> None:
        subject, run = self.subject, self._candidate(gradient)
        for size in sorted({subject.rows, *(n for n in REPEATS_OF_A_PLAN if n < subject.rows)}):
            batch = subject.batch(range(size))
            count = subject.plans(batch, gradient)
            first = run(batch) if count > 1 else {}
            for index in range(1, count):
                with dispatch.force_plan(index):
                    other = run(batch)
                for name, value in first.items():
                    found.compare(
                        "plan", f"launch plan 0 vs {index} of {count} with {size} rows", name, value, other[name]
                    )

    def _notes(self, gradient: bool, shared: list[str]) -> list[str]:
        if not gradient or not shared:
            return []
        names = ", ".join(shared)
        if isinstance(self.subject, OperatorSubject) and self.subject.chain_rows > 1:
            return [
                f"the gradient of {names} folds chains of {self.subject.chain_rows} rows: repeats and launch plans are "
                "tested; another order of the rows may give other bits, is not promised and not tested"
            ]
        if isinstance(self.subject, OperatorSubject) and self.subject.chain_rows == 0:
            return [
                f"the gradient of {names} sums over rows in the fixed order of the contract: repeats and launch plans are "
                "tested; other rows or another order of them may give other bits, is not promised and not tested"
            ]
        if self.subject.promises_fold:
            return [
                f"the gradient of {names} is a left fold over ascending rows: repeats, launch plans and the fold itself are "
                "tested; another order of the rows may give other bits, is not promised and not tested"
            ]
        return [
            f"the gradient of {names} is a sum over rows in an order the candidate does not promise: only repeats are tested"
        ]

    # --- the contract's own bits ----------------------------------------------------------------------------------

    def _reference_bits(self) -> CheckResult:
        subject, name = self.subject, "reference_bits"
        if not isinstance(subject, OperatorSubject) or (
            isinstance(subject, CandidateSubject) and not subject.claims_contract
        ):
            return CheckResult(
                name, "n/a", "the candidate claims no contract (--contract NAME with an operator claims one)"
            )
        if subject.chosen_backend() == "reference":
            return CheckResult(
                name, "n/a", "the candidate is the reference: it defines the bits, accuracy and golden digests judge it"
            )
        found = Comparisons(not subject.canonical_nans, self._reproduce(True))
        for gradient in (False,) if self.forward_only else (False, True):
            for size in sorted({1, min(17, subject.rows), subject.rows}):
                batch = subject.batch(range(size))
                ours, reference = self._candidate(gradient)(batch), subject.reference(batch, gradient)
                for result, value in (reference or {}).items():
                    label = f"{'gradient' if gradient else 'forward'} of {size} rows, reference vs candidate"
                    if result in ours:
                        found.compare("reference", label, result, value, ours[result])
                    else:
                        found.broke("reference", label, result, "the candidate gives none", {})
        return found.result(name)


class Fold:
    """The promised parameter gradient: from +0, one row's contribution after the other."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.totals: dict[str, Tensor] = {}

    def add(self, results: dict[str, Tensor]) -> None:
        for name in self.names:
            total = self.totals.get(name)
            self.totals[name] = (torch.zeros_like(results[name]) if total is None else total) + results[name]
