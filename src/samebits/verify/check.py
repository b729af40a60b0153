"""The four checks, and a fifth for whoever claims a contract: are these its bits?

Invariance compares the candidate with itself, so it is always reported beside accuracy, which an independent golden
judges: a wrong operator can be perfectly invariant.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits import dispatch, registry
from samebits.exact.compare import first_difference
from samebits.operator import dtype_name
from samebits.verify import callables
from samebits.verify.callables import CallableSubject
from samebits.verify.operators import CandidateSubject, OperatorSubject
from samebits.verify.report import CheckResult, Failure, Report, environment
from samebits.verify.subject import Batch, NotRun, Subject, UsageError, first_line
from samebits.verify.tolerance import judge
from samebits.verify.variations import AXES, variations

ONLY = (*AXES, "accuracy", "reference")
"""What ``only`` accepts: an axis of invariance, or one of the other two questions."""
DEFAULT_ROWS = {"cpu": 40, "cuda": 300}
REPEATS_OF_A_PLAN = (1, 17)
"""Batch sizes, beside the whole batch, on which every launch plan runs."""


def check(
    candidate: str | Callable[..., Any],
    *,
    against: str | Callable[..., Any] | None = None,
    contract: str | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    rows: int | None = None,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    shapes: Sequence[str] = (),
    only: Sequence[str] = (),
    forward_only: bool = False,
) -> Report:
    """Check accuracy and batch invariance of an operator, forward and backward.

    Args:
        candidate: the name of a samebits operator, a callable, or where to find one (``module:callable``,
            ``path/file.py:function``, ``torch.mm``).
        against: for an operator, the callable to judge by the operator's inputs and golden in its place; for a callable,
            the callable (or the operator) that judges it.
        contract, backend: of the operator. A callable that is judged as an operator and names a contract claims its bits.
        device: default the GPU if there is one.
        dtype: of the floating inputs; for an operator, of those inputs that take more than one.
        rows: T of the canonical batch; default 40 on a CPU, 300 on a GPU.
        sizes: axis sizes, e.g. ``{"D": 4096}``.
        shapes: argument shapes of a callable that samebits does not know, e.g. ``["T,64", "64,64"]``; T marks the rows.
        only: axes or questions to look at, from ``samebits.verify.ONLY``; default everything.
        forward_only: leave the gradient checks out.

    Raises:
        UsageError (a ValueError): the candidate cannot be found, fed or judged as asked.
    """
    unknown = [axis for axis in only if axis not in ONLY]
    if unknown:
        raise UsageError(f"no axis {unknown[0]!r}; choose from {', '.join(ONLY)}")
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = rows if rows is not None else DEFAULT_ROWS.get(place.type, 40)
    if count < 1:
        raise UsageError(f"rows must be at least 1, not {count}")
    setup = _Setup(candidate, against, contract, backend, place, dtype, count, seed, sizes, tuple(shapes))
    with callables.importable_from_here():
        subject, options = setup.subject()
    examination = _Examination(subject, tuple(only), forward_only, setup.command())
    return Report(
        candidate=subject.title,
        judged_against=subject.judge_note,
        options=options,
        environment=environment(place),
        checks=examination.run(),
    )


@dataclasses.dataclass(frozen=True)
class _Setup:
    """From the arguments of :func:`check` to a subject, and back to a command line."""

    candidate: str | Callable[..., Any]
    against: str | Callable[..., Any] | None
    contract: str | None
    backend: str | None
    device: torch.device
    dtype: torch.dtype | None
    rows: int
    seed: int
    sizes: Mapping[str, int] | None
    shapes: tuple[str, ...]

    def subject(self) -> tuple[Subject, dict[str, Any]]:
        operators = [t for t in (self.candidate, self.against) if isinstance(t, str) and t in registry.names()]
        if not operators:
            return self._callable()
        if len(operators) == 2:
            raise UsageError("an operator is judged by its own golden; --against takes a callable here")
        if self.shapes:
            raise UsageError(f"{operators[0]} declares its inputs; use sizes (e.g. D=4096) instead of shapes")
        options: dict[str, Any] = {
            "name": operators[0],
            "contract": self.contract,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "rows": self.rows,
            "seed": self.seed,
            "sizes": self.sizes,
        }
        target = self.against if self.candidate == operators[0] else self.candidate
        subject: OperatorSubject
        try:
            if target is None:
                subject = OperatorSubject(**options)
            else:
                if self.backend is not None:
                    raise UsageError(
                        f"backend={self.backend!r} chooses among ours, but the candidate is {_title(target)}"
                    )
                function = callables.resolve(target)[0] if isinstance(target, str) else target
                subject = CandidateSubject(function, _title(target), self.contract is not None, **options)
            chosen = subject.chosen_backend()
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(first_line(error)) from error
        return subject, self._recorded(contract=subject.contract, backend=chosen, sizes=subject.sizes)

    def _callable(self) -> tuple[Subject, dict[str, Any]]:
        for name, value in (("contract", self.contract), ("backend", self.backend)):
            if value is not None:
                raise UsageError(
                    f"{name}={value!r}: {_title(self.candidate)} is no samebits operator ({', '.join(registry.names())})"
                )
        function, module = (self.candidate, None) if callable(self.candidate) else callables.resolve(self.candidate)
        dtype = self.dtype or torch.float32
        known = callables.canonical_name(function)
        hook = getattr(module, callables.INPUT_HOOK, None)
        title = known or _title(self.candidate)
        call, sizes = None, dict(self.sizes or {})
        if self.shapes:
            arguments = callables.drawn_arguments(
                callables.parse_shapes(self.shapes), {}, title, self.rows, self.seed, self.device, dtype
            )
        elif hook is not None:
            arguments, call = callables.hooked_arguments(hook, self.rows, self.seed, self.device, dtype)
        elif known is not None:
            signature = callables.KNOWN[known]
            extra = set(sizes) - set(signature.sizes)
            if extra:
                raise UsageError(f"{title} has no axis {sorted(extra)[0]!r}; its axes: {', '.join(signature.sizes)}")
            sizes, call = dict(signature.sizes) | sizes, signature.call
            arguments = callables.drawn_arguments(
                signature.shapes, sizes, title, self.rows, self.seed, self.device, dtype
            )
        else:
            raise UsageError(
                f"samebits does not know the inputs of {title}: give their shapes (--shape T,64 --shape 64,64; T marks the rows), "
                f"or define {callables.INPUT_HOOK}(rows, seed, device, dtype) -> (args, row_args) beside it. "
                f"Known without help: {', '.join(callables.KNOWN)}"
            )
        judge_function = None
        if self.against is not None:
            judge_function = self.against if callable(self.against) else callables.resolve(self.against)[0]
        subject = CallableSubject(
            function, title, arguments, self.rows, self.seed, self.device, call,
            judge_function, _title(self.against) if self.against is not None else "",
        )  # fmt: skip
        return subject, self._recorded(dtype=dtype_name(dtype), sizes=sizes, shapes=list(self.shapes))

    def _recorded(self, **found: Any) -> dict[str, Any]:
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        return {"device": str(self.device), "dtype": dtype, "rows": self.rows, "seed": self.seed} | found

    def command(self) -> list[str]:
        """The command line that repeats this check, all but its axis."""
        parts = ["samebits", "check", _title(self.candidate)]
        for flag, value in (
            ("--against", None if self.against is None else _title(self.against)),
            ("--contract", self.contract),
            ("--backend", self.backend),
            ("--dtype", None if self.dtype is None else dtype_name(self.dtype)),
            ("--device", str(self.device)),
            ("--rows", str(self.rows)),
            ("--seed", str(self.seed)),
        ):
            if value is not None:
                parts += [flag, value]
        for axis, size in (self.sizes or {}).items():
            parts += ["--size", f"{axis}={size}"]
        for shape in self.shapes:
            parts += ["--shape", shape]
        return parts


def _title(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', type(target).__name__)}"


class _Comparisons:
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


class _Examination:
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
        found = _Comparisons(not subject.canonical_nans, self._reproduce(gradient))
        try:
            base = run(self.canonical)
        except NotRun:
            raise
        except Exception as error:
            raise NotRun(f"the candidate raised {type(error).__name__}: {first_line(error)}") from error
        rowwise = [name for name in base if subject.is_row(name, gradient)]
        shared = [name for name in base if name not in rowwise]
        fold = _Fold(shared) if gradient and subject.promises_fold and "fold" in self.axes else None
        axes = self.axes if fold is None else tuple({*self.axes, "single"})
        for variation in variations(subject.rows, axes):
            restored = {name: base[name].clone() for name in rowwise}
            try:
                for part in variation.parts:
                    results = run(subject.batch(part.ids))
                    keep = torch.tensor(part.keep, device=subject.device)
                    rows = torch.tensor([part.ids[k] for k in part.keep], device=subject.device)
                    for name in rowwise:
                        restored[name][rows] = results[name][keep]
                    if variation.axis == "repeat":
                        for name in shared:
                            found.compare("repeat", variation.label, name, base[name], results[name])
                    if variation.axis == "single" and fold is not None:
                        fold.add(results)
            except Exception as error:
                what = f"raised {type(error).__name__}: {first_line(error)}"
                found.broke(variation.axis, variation.label, ", ".join(rowwise), what, {})
                fold = None
                continue
            if variation.axis in self.axes:
                for name in rowwise:
                    found.compare(variation.axis, variation.label, name, base[name], restored[name])
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
                found.compare("autograd", "autograd vs the explicit backward", name, explicit, both[0][name])
        return found.result("gradient_invariance" if gradient else "forward_invariance", self._notes(gradient, shared))

    def _plans(self, gradient: bool, found: _Comparisons) -> None:
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
        found = _Comparisons(not subject.canonical_nans, self._reproduce(True))
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


class _Fold:
    """The promised parameter gradient: from +0, one row's contribution after the other."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.totals: dict[str, Tensor] = {}

    def add(self, results: dict[str, Tensor]) -> None:
        for name in self.names:
            total = self.totals.get(name)
            self.totals[name] = (torch.zeros_like(results[name]) if total is None else total) + results[name]
