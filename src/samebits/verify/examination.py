"""Runs the checks of a subject of rows: what becomes of a row when the batch around it changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samebits import dispatch
from samebits.verify.operators import CandidateSubject, OperatorSubject
from samebits.verify.questions import Comparisons, Judged, Questions, results_of
from samebits.verify.report import CheckResult
from samebits.verify.subject import Batch, Subject, first_line, positions
from samebits.verify.variations import AXES, variations

REPEATS_OF_A_PLAN = (1, 17)
"""Batch sizes, beside the whole batch, on which every launch plan runs."""


class Examination(Questions):
    """The answers of a subject of rows."""

    def __init__(self, subject: Subject, only: tuple[str, ...], forward_only: bool, command: list[str]) -> None:
        super().__init__(AXES, only, forward_only, command)
        self.subject = subject
        self.canonical = subject.batch(range(subject.rows))

    def _candidate(self, gradient: bool) -> Callable[[Batch], dict[str, Tensor]]:
        return self.subject.backward if gradient else self.subject.forward

    # --- accuracy -------------------------------------------------------------------------------------------------

    def accuracy(self, gradient: bool) -> CheckResult:
        values = results_of(lambda: self._candidate(gradient)(self.canonical))
        found = Judged(self.reproduce(gradient)("accuracy"))
        limit = lambda name: self.subject.tolerance(name, values[name].dtype, gradient)  # noqa: E731
        found.judge(values, self.subject.golden(self.canonical, gradient), limit)
        return found.result("gradient_accuracy" if gradient else "forward_accuracy")

    # --- invariance -----------------------------------------------------------------------------------------------

    def invariance(self, gradient: bool) -> CheckResult:
        subject, run = self.subject, self._candidate(gradient)
        found = Comparisons(not subject.canonical_nans, self.reproduce(gradient))
        base = results_of(lambda: run(self.canonical))
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

    def reference_bits(self) -> CheckResult:
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
        found = Comparisons(not subject.canonical_nans, self.reproduce(True))
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
