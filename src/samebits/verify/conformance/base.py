"""What the conformance tests share: parametrisation from the declaration, inputs drawn once, runs, comparisons."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from samebits import registry
from samebits.checks import DTYPES, dtype_name
from samebits.contract import OpSpec, Result
from samebits.exact.compare import first_difference
from samebits.operator import Operator
from samebits.verify.inputs import PATTERNS
from samebits.verify.layouts import LAYOUTS
from samebits.verify.operators import OperatorSubject, derived
from samebits.verify.subject import Batch, gradients, leaf

REFERENCE_ON_GPU = (
    "test_accuracy",
    "test_check_passes",
    "test_no_rows",
    "test_special_rows_leave_their_neighbours_alone",
    "test_runs_on_the_device_of_its_inputs",
)
"""What depends on torch's own GPU kernels, whose order the reference must not leave to them. It defines the bits everywhere
else by the same code that is tested on a CPU."""
LEADS = ((), (3,), (2, 3), (1, 1, 5), (4, 1))


@dataclass(frozen=True)
class Target:
    """A backend on a device."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


def targets(spec: OpSpec) -> tuple[list[Target], list[Target]]:
    """(on a CPU, on a GPU)."""
    return [Target("reference", "cpu")], [Target(b.name, "cuda") for b in spec.backends]


def free_sizes(spec: OpSpec, width: int, held: Mapping[str, int]) -> dict[str, int]:
    """A size for every free axis: the one it is held at, or ``width`` as far as its limits allow."""
    free = {axis: min(max(width, least), most) for axis, least, most in spec.size_limits}
    return spec.fitted(free | dict(held))


@functools.lru_cache(maxsize=64)
def _drawn(
    op: str, device: str, width: int, pattern: str, dtype: str, rows: int, held: tuple[tuple[str, int], ...]
) -> OperatorSubject:
    """Inputs are drawn once for all contracts and backends."""
    sizes = free_sizes(registry.spec(op), width, dict(held))
    chosen = DTYPES[dtype] if dtype else None
    return OperatorSubject(op, None, "reference", torch.device(device), chosen, rows, 0, sizes, pattern)


def subject_for(
    op: str,
    contract: str,
    target: Target,
    width: int,
    pattern: str,
    dtype: str,
    rows: int,
    held: Mapping[str, int] = MappingProxyType({}),
) -> OperatorSubject:
    subject = copy.copy(_drawn(op, target.device, width, pattern, dtype, rows, tuple(held.items())))
    subject.contract, subject.backend = contract, target.backend
    return subject


def assert_same(left: Tensor, right: Tensor, what: str) -> None:
    difference = first_difference(left, right, payloads=left.device.type != "cpu")
    assert difference is None, f"{what}: {difference}"


def assert_all_same(left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
    assert left.keys() == right.keys(), what
    for name in left:
        assert_same(left[name], right[name], f"{what}, {name}")


class Base:
    op: ClassVar[str] = ""
    width: ClassVar[int] = 136
    """Size of the free axes in tests that are not about sizes: a whole number of vectors, and not a power of two."""
    held: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Free axes that keep one size in every test."""

    standing: ClassVar[tuple[str, ...]] = ()
    """Where contracts come in pairs that differ in one formula: those that stand for all in tests that are not about bits, and
    on a CPU, where the reference meets itself."""
    cpu_patterns: ClassVar[Sequence[str]] = PATTERNS
    """Patterns of values on a CPU; where a reference is slow, those that can make a row depend on another."""

    # --- parametrisation ------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        together: tuple[str, ...] = ()
        if {"target", "contract", "pattern"} <= set(metafunc.fixturenames):
            together = ("target", "contract", "pattern")
            metafunc.parametrize(together, list(self._kept_patterns(metafunc)))
        elif {"target", "contract"} <= set(metafunc.fixturenames):
            together = ("target", "contract")
            metafunc.parametrize(together, list(self._kept_pairs(metafunc)))
        for name in ("target", "contract", "pattern", "layout", "arg", "backward", "subset", "lead", "many"):
            if name in metafunc.fixturenames and name not in together:
                metafunc.parametrize(name, list(getattr(self, f"_{name}_values")(metafunc)))

    def _kept_patterns(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        for pair in self._kept_pairs(metafunc):
            on_cpu = pair.values[0].device == "cpu"
            for pattern in self.cpu_patterns if on_cpu else self._pattern_values(metafunc):
                yield pytest.param(*pair.values, pattern, id=f"{pair.id}-{pattern}", marks=pair.marks)

    def _kept_pairs(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        """Every target with every contract whose bits its backend gives."""
        for target in self._target_values(metafunc):
            for contract in self._contract_values(metafunc):
                stands = not self.standing or contract in self.standing or target.values[0].device != "cpu"
                if stands and self.spec.keeps(target.values[0].backend, contract):
                    yield pytest.param(target.values[0], contract, id=f"{target.id}-{contract}", marks=target.marks)

    @property
    def spec(self) -> OpSpec:
        return registry.spec(self.op)

    @property
    def operator(self) -> Operator:
        return registry.operator(self.op)

    def _target_values(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        """On a GPU the reference, which is slow there, runs only the tests that a CPU cannot do for it."""
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        no_reference = metafunc.function.__name__ not in REFERENCE_ON_GPU
        on_cpu, on_gpu = targets(self.spec)
        if "gpu" not in marks:
            yield from (pytest.param(target, id=str(target)) for target in on_cpu)
        for target in on_gpu:
            if not (no_reference and target.backend == "reference"):
                yield pytest.param(target, id=str(target), marks=pytest.mark.gpu)

    def _contract_values(self, metafunc: pytest.Metafunc) -> list[str]:
        about_bits = metafunc.function.__name__.startswith(("test_bits", "test_accuracy", "test_check"))
        return [c.name for c in self.spec.contracts if about_bits or not self.standing or c.name in self.standing]

    def _pattern_values(self, metafunc: pytest.Metafunc) -> Sequence[str]:
        return PATTERNS

    def _layout_values(self, metafunc: pytest.Metafunc) -> Sequence[str]:
        return tuple(LAYOUTS)

    def _backward_values(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        yield pytest.param(False, id="forward")
        yield pytest.param(True, id="backward")

    def _arg_values(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        for backward in (False, True):
            for arg in self.spec.direction(backward).inputs:
                yield pytest.param((backward, arg), id=f"{'backward' if backward else 'forward'}-{arg.name}")

    def _subset_values(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        learned = self.spec.learned
        count = len(learned)
        every = list(itertools.product((False, True), repeat=count))
        if count > 3:  # none, each alone, each missing, all
            every = [subset for subset in every if sum(subset) in (0, 1, count - 1, count)]
        for subset in every:
            names = [name for name, on in zip(learned, subset, strict=True) if on]
            yield pytest.param(subset, id="+".join(names) or "none")

    def _lead_values(self, metafunc: pytest.Metafunc) -> Sequence[tuple[int, ...]]:
        return LEADS

    def _many_values(self, metafunc: pytest.Metafunc) -> Sequence[int]:
        return (65535, 65536, 65537, 131073)

    # --- tools ----------------------------------------------------------------------------------------------------

    def widths(self, *sizes: int) -> tuple[int, ...]:
        """Sizes to try for the free axes; where every axis is fixed there is nothing to try, and one stands for all."""
        return sizes if self.spec.size_limits else (self.width,)

    def subject(
        self,
        target: Target,
        contract: str | None = None,
        width: int | None = None,
        pattern: str = "normal",
        dtype: str = "",
        rows: int = 40,
    ) -> OperatorSubject:
        name = self.spec.contract(contract).name
        return subject_for(self.op, name, target, width or self.width, pattern, dtype, rows, self.held)

    def free_sizes(self, width: int) -> dict[str, int]:
        return free_sizes(self.spec, width, self.held)

    def upstream_dtypes(self, contract: str | None = None) -> list[str]:
        """Every dtype that some input of a backward may have beside its first under the contract; "" is the first."""
        accepted = self.spec.contract(contract).accepted
        return ["", *sorted({d for arg in self.spec.backward.inputs for d in accepted(arg)[1:]})]

    def forward_inputs(self, subject: OperatorSubject, batch: Batch) -> list[Tensor]:
        return [batch.tensor(arg.name) for arg in self.spec.forward.inputs]

    def backward_inputs(self, subject: OperatorSubject, batch: Batch) -> list[Tensor]:
        return subject.backward_inputs(batch, subject.forward(batch))

    def inputs(self, subject: OperatorSubject, batch: Batch, backward: bool) -> list[Tensor]:
        return self.backward_inputs(subject, batch) if backward else self.forward_inputs(subject, batch)

    def run(
        self, subject: OperatorSubject, tensors: Sequence[Tensor | None], backward: bool, **options: Any
    ) -> dict[str, Tensor]:
        call: Callable[..., tuple[Tensor | None, ...]] = self.operator.backward if backward else self.operator.forward
        options = {"contract": subject.contract, "backend": subject.backend, **subject.scalars} | options
        named = zip(self.spec.direction(backward).results, call(*tensors, **options), strict=True)
        return {result.name: value for result, value in named if value is not None}

    def public_function(self) -> Callable[..., Any]:
        """``samebits.<op>``."""
        return getattr(importlib.import_module(str(registry.home_of(self.op))), self.op)

    def public(self) -> list[Result]:
        return [r for r in self.spec.forward.results if not r.hidden]

    def gradient_dtypes(self, subject: OperatorSubject) -> list[torch.dtype]:
        """What ``grad_dtype`` may be for the dtypes of the subject's inputs."""
        chosen = {name: dtype_name(dtype) for name, dtype in subject.dtypes.items()}
        return [DTYPES[name] for name in self.spec.gradient_dtypes_of(chosen)]

    def consistent(
        self, subject: OperatorSubject, tensors: Sequence[Tensor], backward: bool, kept: Sequence[int] = ()
    ) -> list[Tensor]:
        """The tensors, with the derived ones (but those at ``kept``) made anew from the others."""
        direction = self.spec.direction(backward)
        known = dict(zip((arg.name for arg in direction.inputs), tensors, strict=True))
        made = derived(self.spec, direction, known, subject.sizes)
        given = enumerate(zip(direction.inputs, tensors, strict=True))
        return [t if at in kept else made.get(arg.name, t) for at, (arg, t) in given]

    def leaves(self, subject: OperatorSubject, batch: Batch) -> dict[str, Tensor]:
        return {name: leaf(value) for name, value in (batch.rows | batch.shared).items()}

    def differentiate(
        self,
        subject: OperatorSubject,
        leaves: dict[str, Tensor],
        batch: Batch,
        upstream: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Gradients through autograd of the named results (default: all)."""
        tensors = [leaves[arg.name] for arg in self.spec.forward.inputs]
        results = self.run(subject, tensors, backward=False)
        names = [r.name for r in self.public()] if upstream is None else upstream
        return gradients(results, leaves, {n: batch.upstream[n].to(results[n].dtype) for n in names})

    def _refused(
        self,
        subject: OperatorSubject,
        tensors: Sequence[Any],
        backward: bool,
        error: type[Exception],
        *words: str,
        **options: Any,
    ) -> None:
        """The call raises, the message has every word, and no input changed."""
        real = [t for t in tensors if isinstance(t, Tensor) and t.device.type != "meta" and t.numel() < 2**20]
        before = [t.clone() for t in real]
        with pytest.raises(error) as caught:
            self.run(subject, tensors, backward, **options)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in {caught.value}"
        for old, new in zip(before, real, strict=True):
            assert_same(old, new, "an input after an error")
