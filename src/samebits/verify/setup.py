"""From the arguments of a check to a subject, and back to the command line that repeats it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from samebits import catalogue
from samebits.checks import dtype_name
from samebits.verify import callables
from samebits.verify.callables import CallableSubject
from samebits.verify.examination import Examination
from samebits.verify.operators import CandidateSubject, OperatorSubject
from samebits.verify.questions import Examined
from samebits.verify.subject import Subject, UsageError, first_line
from samebits.verify.variations import AXES


@dataclasses.dataclass(frozen=True)
class Setup:
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

    @functools.cached_property
    def operator(self) -> str | None:
        """The operator that is judged, or whose inputs and golden judge; None: there is only a callable."""
        named = [t for t in (self.candidate, self.against) if isinstance(t, str) and t in catalogue.names()]
        if len(named) == 2:
            raise UsageError("an operator is judged by its own golden; --against takes a callable here")
        if named and self.shapes:
            raise UsageError(f"{named[0]} declares its inputs; use sizes (e.g. D=4096) instead of shapes")
        return named[0] if named else None

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which invariance is looked at."""
        if self.operator in catalogue.of_sequences():
            axes: tuple[str, ...] = catalogue.part(str(self.operator), "checking").AXES
            return axes
        return AXES

    def examined(self, only: tuple[str, ...], forward_only: bool) -> Examined:
        if self.operator in catalogue.of_sequences():
            return self._of_sequences(str(self.operator), only, forward_only)
        subject, options = self.subject()
        questions = Examination(subject, only, forward_only, self.command())
        return Examined(subject.title, subject.judge_note, options, questions)

    def _of_sequences(self, name: str, only: tuple[str, ...], forward_only: bool) -> Examined:
        target = self.against if self.candidate == name else self.candidate
        function, title = None, name
        if target is not None:
            self._refuse_backend(target)
            function, title = callables.resolve(target)[0] if isinstance(target, str) else target, _title(target)
        try:
            found: Examined = catalogue.part(name, "checking").examined(self, function, title, only, forward_only)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(first_line(error)) from error
        return dataclasses.replace(found, options=self._recorded(**found.options))

    def _refuse_backend(self, target: str | Callable[..., Any]) -> None:
        if self.backend is not None:
            raise UsageError(f"backend={self.backend!r} chooses among ours, but the candidate is {_title(target)}")

    def subject(self) -> tuple[Subject, dict[str, Any]]:
        """Of an operator of rows, or of a callable."""
        if self.operator is None:
            return self._callable()
        options: dict[str, Any] = {
            "name": self.operator,
            "contract": self.contract,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "rows": self.rows,
            "seed": self.seed,
            "sizes": self.sizes,
        }
        target = self.against if self.candidate == self.operator else self.candidate
        subject: OperatorSubject
        try:
            if target is None:
                subject = OperatorSubject(**options)
            else:
                self._refuse_backend(target)
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
                    f"{name}={value!r}: {_title(self.candidate)} is no samebits operator ({', '.join(catalogue.names())})"
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
