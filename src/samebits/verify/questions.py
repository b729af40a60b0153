"""What a check asks and how an answer is collected, whatever kind of operator answers.

Invariance compares the candidate with itself, so it always stands beside accuracy, which an independent golden judges:
a wrong operator can be perfectly invariant.
"""

from __future__ import annotations

import dataclasses
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samebits.exact.compare import first_difference
from samebits.verify.report import CheckResult, Failure
from samebits.verify.subject import NotRun, first_line
from samebits.verify.tolerance import Tolerance, judge


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


class Judged:
    """Collects the errors of one accuracy check, as fractions of what is allowed."""

    def __init__(self, reproduce: str) -> None:
        self.reproduce = reproduce
        self.count = 0
        self.worst: dict[str, float] = {}
        self.failures: list[Failure] = []

    def judge(
        self,
        values: Mapping[str, Tensor],
        golden: Mapping[str, Tensor],
        limit: Callable[[str], Tolerance],
        where: str = "",
    ) -> None:
        """Every result that the golden has. ``limit`` of a result's name; ``where``: of which inputs, if there are several."""
        for result, exact in golden.items():
            self.count += 1
            if result not in values:
                self._fail(where, "against the golden", result, "the candidate gives none, the golden has one", {})
                continue
            allowed = limit(result)
            try:
                worst, excess = judge(values[result], exact, allowed)
            except ValueError as error:
                self._fail(where, "against the golden", result, str(error), {})
                continue
            self.worst[result] = max(worst, self.worst.get(result, 0.0))
            if excess is not None:
                self._fail(where, f"tolerance {allowed}", result, str(excess), dataclasses.asdict(excess))

    def _fail(self, where: str, label: str, result: str, what: str, evidence: dict[str, Any]) -> None:
        label = f"{where}: {label}" if where else label
        self.failures.append(Failure("accuracy", label, result, what, self.reproduce, evidence))

    def result(self, name: str) -> CheckResult:
        if self.failures:
            summary = "; ".join(f"{f.result}: {f.what}" for f in self.failures)
        else:
            shown = ", ".join(f"{n} {v:.2g}" for n, v in self.worst.items())
            summary = f"error as a fraction of the tolerance: {shown}"
        return CheckResult(name, "fail" if self.failures else "pass", summary, self.count, tuple(self.failures))


class Questions(ABC):
    """The five questions, in order. A kind of operator answers each in its own way; what is asked and told is the same."""

    def __init__(self, axes: tuple[str, ...], only: tuple[str, ...], forward_only: bool, command: list[str]) -> None:
        self.only, self.forward_only, self.command = only, forward_only, command
        self.axes = tuple(axis for axis in axes if not only or axis in only)

    @abstractmethod
    def accuracy(self, gradient: bool) -> CheckResult: ...

    @abstractmethod
    def invariance(self, gradient: bool) -> CheckResult: ...

    @abstractmethod
    def reference_bits(self) -> CheckResult: ...

    def run(self) -> tuple[CheckResult, ...]:
        return (
            self._guarded("forward_accuracy", "accuracy", lambda: self.accuracy(False)),
            self._guarded("forward_invariance", None, lambda: self.invariance(False)),
            self._guarded("gradient_accuracy", "accuracy", lambda: self.accuracy(True)),
            self._guarded("gradient_invariance", None, lambda: self.invariance(True)),
            self._guarded("reference_bits", "reference", self.reference_bits),
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

    def reproduce(self, gradient: bool) -> Callable[[str], str]:
        """The command line that shows what differs along an axis again."""
        extra = [] if gradient else ["--forward-only"]
        return lambda axis: shlex.join([*self.command, "--only", axis, *extra])


@dataclass(frozen=True)
class Examined:
    """A candidate, ready to be asked."""

    title: str
    judge_note: str
    """Against what accuracy is judged, in words."""
    options: dict[str, Any]
    """What decides the outcome, beside what was asked for."""
    questions: Questions


def results_of(run: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the candidate gives. :class:`NotRun` where it raises: nothing can be judged then."""
    try:
        return run()
    except NotRun:
        raise
    except Exception as error:
        raise NotRun(f"the candidate raised {type(error).__name__}: {first_line(error)}") from error
