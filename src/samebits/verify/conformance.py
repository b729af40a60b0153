"""The tests every operator must pass, derived from its declaration. An operator's test file is

    class TestMyOp(Conformance):
        op = "my_op"

plus what is special to it. On a CPU the reference is tested; with a GPU every other backend is, bit for bit against the
reference. Comments name the kind of fault a test looks for (sections A to G of the list of hostile inputs).
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from samebits import dispatch, registry
from samebits.contract import OpSpec, Result, TensorArg
from samebits.dispatch import UnsupportedError
from samebits.exact.compare import first_difference
from samebits.operator import DTYPES, Operator, dtype_name
from samebits.verify.check import check
from samebits.verify.inputs import FINITE_PATTERNS, PATTERNS
from samebits.verify.layouts import LAYOUTS, first_row_far_stride
from samebits.verify.operators import OperatorSubject
from samebits.verify.subject import Batch, gradients, leaf
from samebits.verify.tolerance import judge

ROWS = (0, 1, 7, 16, 33, 70, 128, 129, 257, 300)
ODD_WIDTHS = (1, 17, 63, 127, 129, 136)
WIDE_WIDTHS = (4096, 7168)
VERY_WIDE_WIDTHS = (8193, 16384)
LEADS = ((), (3,), (2, 3), (1, 1, 5), (4, 1))
EMPTY_LEADS = ((0,), (0, 3), (3, 0))


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


@functools.lru_cache(maxsize=48)
def _drawn(op: str, device: str, width: int, pattern: str, dtype: str, rows: int) -> OperatorSubject:
    """Inputs are drawn once for all contracts and backends. Every free axis has size ``width``."""
    sizes = {axis: width for axis, _, _ in registry.spec(op).size_limits}
    chosen = DTYPES[dtype] if dtype else None
    return OperatorSubject(op, None, "reference", torch.device(device), chosen, rows, 0, sizes, pattern)


def subject_for(
    op: str, contract: str, target: Target, width: int, pattern: str, dtype: str, rows: int
) -> OperatorSubject:
    subject = copy.copy(_drawn(op, target.device, width, pattern, dtype, rows))
    subject.contract, subject.backend = contract, target.backend
    return subject


def assert_same(left: Tensor, right: Tensor, what: str) -> None:
    difference = first_difference(left, right, payloads=left.device.type != "cpu")
    assert difference is None, f"{what}: {difference}"


def assert_all_same(left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
    assert left.keys() == right.keys(), what
    for name in left:
        assert_same(left[name], right[name], f"{what}, {name}")


class Conformance:
    op: ClassVar[str] = ""
    width: ClassVar[int] = 136
    """Size of the free axes in tests that are not about sizes: a whole number of vectors, and not a power of two."""

    # --- parametrisation ------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        gpu, big = (metafunc.definition.get_closest_marker(name) is not None for name in ("gpu", "big"))
        for name in ("target", "contract", "pattern", "width", "layout", "arg", "backward", "subset", "lead", "many"):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(getattr(self, f"_{name}_values")(gpu, big)))

    @property
    def spec(self) -> OpSpec:
        return registry.spec(self.op)

    @property
    def operator(self) -> Operator:
        return registry.operator(self.op)

    def _target_values(self, gpu: bool, big: bool) -> Iterator[Any]:
        on_cpu, on_gpu = targets(self.spec)
        if not gpu:
            for target in on_cpu:
                yield pytest.param(target, id=str(target))
        for target in [
            t for t in on_gpu if not (big and t.backend == "reference")
        ]:  # it may use a multiple of the memory
            yield pytest.param(target, id=str(target), marks=pytest.mark.gpu)

    def _contract_values(self, gpu: bool, big: bool) -> list[str]:
        return [c.name for c in self.spec.contracts]

    def _pattern_values(self, gpu: bool, big: bool) -> Sequence[str]:
        return PATTERNS

    def _width_values(self, gpu: bool, big: bool) -> Sequence[int]:
        return ODD_WIDTHS

    def _layout_values(self, gpu: bool, big: bool) -> Sequence[str]:
        return tuple(LAYOUTS)

    def _backward_values(self, gpu: bool, big: bool) -> Iterator[Any]:
        yield pytest.param(False, id="forward")
        yield pytest.param(True, id="backward")

    def _arg_values(self, gpu: bool, big: bool) -> Iterator[Any]:
        for backward in (False, True):
            for arg in self.spec.direction(backward).inputs:
                yield pytest.param((backward, arg), id=f"{'backward' if backward else 'forward'}-{arg.name}")

    def _subset_values(self, gpu: bool, big: bool) -> Iterator[Any]:
        for subset in itertools.product((False, True), repeat=len(self.spec.forward.inputs)):
            names = [a.name for a, on in zip(self.spec.forward.inputs, subset, strict=True) if on]
            yield pytest.param(subset, id="+".join(names) or "none")

    def _lead_values(self, gpu: bool, big: bool) -> Sequence[tuple[int, ...]]:
        return LEADS

    def _many_values(self, gpu: bool, big: bool) -> Sequence[int]:
        return (65535, 65536, 65537, 131073)

    # --- tools ----------------------------------------------------------------------------------------------------

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
        return subject_for(self.op, name, target, width or self.width, pattern, dtype, rows)

    def upstream_dtypes(self) -> list[str]:
        """Every dtype that some upstream gradient may have beside its first; "" is the first."""
        return ["", *sorted({d for arg in self.spec.backward.inputs for d in arg.dtypes[1:]})]

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

    # --- bits, accuracy, invariance -------------------------------------------------------------------------------

    def _assert_bits(
        self, target: Target, contract: str, pattern: str, width: int, rows: Sequence[int], plans: int | None = None
    ) -> None:
        """Every batch size, launch plan and gradient dtype has the bits that the reference has for the largest batch."""
        most = max(rows)
        for dtype in self.upstream_dtypes():
            subject = self.subject(target, contract, width, pattern, dtype, rows=most)
            judge_of = self.subject(Target("reference", target.device), contract, width, pattern, dtype, rows=most)
            whole = judge_of.batch(range(most))
            saved = self.run(judge_of, self.forward_inputs(judge_of, whole), backward=False)
            exact = self.run(judge_of, judge_of.backward_inputs(whole, saved), backward=True)
            row_names = [r.name for r in self.spec.backward.results if r.rows]
            for count in rows:
                batch = subject.batch(range(count))
                forward = self.forward_inputs(subject, batch)
                backward = subject.backward_inputs(batch, {n: v[:count] for n, v in saved.items()})
                summed = self.run(
                    judge_of, backward, backward=True, wanted=[not r.rows for r in self.spec.backward.results]
                )
                expected = {n: exact[n][:count] for n in row_names} | summed
                for index in range(self._plan_count(subject, forward, False)):
                    with dispatch.force_plan(index):
                        got = self.run(subject, forward, backward=False)
                    assert_all_same(
                        {n: v[:count] for n, v in saved.items()}, got, f"forward, {count} rows, plan {index}"
                    )
                for index in range(self._plan_count(subject, backward, True)):
                    for grad_dtype in (torch.float32, torch.bfloat16):
                        with dispatch.force_plan(index):
                            got = self.run(subject, backward, backward=True, grad_dtype=grad_dtype)
                        rounded = {n: v.to(got[n].dtype) for n, v in expected.items()}
                        what = f"backward, {count} rows, plan {index}, {dtype_name(grad_dtype)}, upstream {dtype or 'first'}"
                        assert_all_same(rounded, got, what)

    def _plan_count(self, subject: OperatorSubject, tensors: Sequence[Tensor], backward: bool) -> int:
        ready = self.operator.prepare(
            backward, tensors, list(subject.scalars.values()), subject.contract, subject.backend
        )
        return len(self.operator.backend(ready.choice.backend).plans(ready.call))

    def test_bits_of_every_batch_size(self, target: Target, contract: str, pattern: str) -> None:
        # H1, H3, B13: a threshold in the launch must not show. D5: tails of every kind.
        for width in ODD_WIDTHS if target.device == "cuda" else (1, 17, self.width):
            self._assert_bits(target, contract, pattern, width, ROWS if target.device == "cuda" else (0, 1, 7, 33))

    def test_bits_of_wide_rows(self, target: Target, contract: str) -> None:
        on_gpu = target.device == "cuda"
        for width in WIDE_WIDTHS:
            for pattern in PATTERNS if on_gpu else ("normal",):
                self._assert_bits(target, contract, pattern, width, ROWS if on_gpu else (1, 3))

    def test_bits_of_very_wide_rows(self, target: Target, contract: str) -> None:
        # B11: more than one block's shared memory holds.
        for width in VERY_WIDE_WIDTHS if target.device == "cuda" else VERY_WIDE_WIDTHS[:1]:
            self._assert_bits(target, contract, "normal", width, (1, 3))

    def test_accuracy(self, target: Target, contract: str) -> None:
        # H16, E4, E13, E17: an independent FP64 golden, random weights, awkward rows.
        for width, pattern in itertools.product((1, 17, self.width, 1000), FINITE_PATTERNS):
            subject = self.subject(target, contract, width, pattern)
            batch = subject.batch(range(subject.rows))
            for gradient in (False, True):
                values = subject.backward(batch) if gradient else subject.forward(batch)
                for name, golden in subject.golden(batch, gradient).items():
                    _, excess = judge(values[name], golden, subject.tolerance(name, values[name].dtype, gradient))
                    assert excess is None, f"{name}, width {width}, {pattern}: {excess}"

    def test_check_passes(self, target: Target, contract: str) -> None:
        report = check(
            self.op, contract=contract, backend=target.backend, device=target.device,
            sizes={axis: self.width for axis, _, _ in self.spec.size_limits}, rows=20 if target.device == "cpu" else 300,
        )  # fmt: skip
        four = {name: status for name, status in report.status().items() if name != "reference_bits"}
        assert set(four.values()) == {"pass"}, report.checks
        assert report.check("reference_bits").status == ("n/a" if target.backend == "reference" else "pass"), (
            report.checks
        )

    def test_special_rows_leave_their_neighbours_alone(self, target: Target, contract: str) -> None:
        # E6, E9, E10: rows of zeros, NaN, infinities beside ordinary rows.
        ordinary = self.subject(target, contract)
        batch = ordinary.batch(range(ordinary.rows))
        expected = ordinary.forward(batch), ordinary.backward(batch)
        for pattern in PATTERNS:
            subject = self.subject(target, contract, pattern=pattern)
            mixed = subject.batch(range(subject.rows))
            for gradient, got in enumerate((subject.forward(mixed), subject.backward(mixed))):
                for name, value in got.items():
                    if subject.is_row(name, bool(gradient)):
                        assert_same(expected[gradient][name][1::2], value[1::2], f"{name} beside {pattern} rows")

    def test_very_many_rows(self, target: Target, many: int) -> None:
        # B9, B5: launch-grid limits and scratch sizes.
        if target.device == "cpu" and many != 65537:
            many = 300  # one large size is enough for the reference
        subject = self.subject(target, width=8, rows=257)
        base = subject.batch(range(257))
        batch = subject.batch([t % 257 for t in range(many)])
        index = torch.tensor(batch.ids, device=subject.device)
        for gradient in (False, True):
            small = subject.backward(base) if gradient else subject.forward(base)
            large = subject.backward(batch) if gradient else subject.forward(batch)
            for name, value in large.items():
                if subject.is_row(name, gradient):
                    assert_same(small[name][index], value, f"{name} of {many} rows")

    # --- layouts (A, C3, D) ---------------------------------------------------------------------------------------

    def _assert_layout(
        self, subject: OperatorSubject, tensors: list[Tensor], backward: bool, change: Callable[[Tensor], Tensor | None]
    ) -> bool:
        args = self.spec.direction(backward).inputs
        views = [change(tensor) for tensor in tensors]
        cases = [[index] for index, view in enumerate(views) if view is not None]
        if not cases:
            return False
        for changed in [*cases, [case[0] for case in cases]]:
            given = [views[i] if i in changed else t for i, t in enumerate(tensors)]
            dense = [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in given]
            with dispatch.policy("silent"):
                got = self.run(subject, given, backward)
            what = ", ".join(args[i].name for i in changed)
            assert_all_same(self.run(subject, dense, backward), got, f"layout of {what}")
            for result, before in zip(given, dense, strict=True):
                if result is not None and before is not None:
                    assert_same(before, result, "an input after the call")
        return True

    def test_layouts(self, target: Target, layout: str, backward: bool) -> None:
        for width in (1, 17, self.width) if target.device == "cpu" else (1, 17, self.width, 4096):
            subject = self.subject(target, width=width, rows=12)
            tensors = self.inputs(subject, subject.batch(range(12)), backward)
            assert self._assert_layout(subject, tensors, backward, LAYOUTS[layout])

    def test_dense_rows_are_read_in_place(self, target: Target, backward: bool) -> None:
        # A8: any row stride, also 0 and overlapping, is read where it is; only a last axis that is not dense is copied.
        subject = self.subject(target)
        args = self.spec.direction(backward).inputs
        tensors = self.inputs(subject, subject.batch(range(12)), backward)
        scalars = list(subject.scalars.values())
        for name in (
            "row_slice",
            "column_window",
            "chunk_of_table",
            "misaligned_1",
            "expanded_rows",
            "overlapping_rows",
        ):
            views = [LAYOUTS[name](t) if arg.rows and arg.axes else None for arg, t in zip(args, tensors, strict=True)]
            given = [t if view is None else view for view, t in zip(views, tensors, strict=True)]
            ready = self.operator.prepare(backward, given, scalars, subject.contract, subject.backend)
            assert ready.copies == (), name
            pointers = [t.data_ptr() for t in ready.inputs.values()]
            assert pointers == [t.data_ptr() for t in given], name

    def test_a_single_row_with_a_stride_beyond_32_bits(self, target: Target, backward: bool) -> None:
        # C3, A10
        subject = self.subject(target)
        tensors = self.inputs(subject, subject.batch([0]), backward)
        assert self._assert_layout(subject, tensors, backward, first_row_far_stride)

    def test_batch_axes_in_any_order(self, target: Target, backward: bool) -> None:
        # A7: the row pitch of a three-dimensional slice; A2: permuted batch axes.
        subject = self.subject(target)
        args = self.spec.direction(backward).inputs
        flat = self.inputs(subject, subject.batch(range(12)), backward)
        shaped = [t.view(3, 4, *t.shape[1:]) if arg.rows else t for arg, t in zip(args, flat, strict=True)]

        def slice_of_longer(t: Tensor) -> Tensor:
            wide = torch.full((3, 9, *t.shape[2:]), float("nan"), dtype=t.dtype, device=t.device)
            wide[:, 2:6] = t
            return wide[:, 2:6]

        def swapped(t: Tensor) -> Tensor:
            return t.transpose(0, 1).contiguous().transpose(0, 1)

        expected = self.run(subject, shaped, backward)
        for change in (slice_of_longer, swapped):
            views = [change(t) if arg.rows else t for arg, t in zip(args, shaped, strict=True)]
            with dispatch.policy("silent"):
                assert_all_same(expected, self.run(subject, views, backward), change.__name__)

    def test_any_strides(self, target: Target, backward: bool) -> None:
        # A2: seeded random permutations, steps, pitches and offsets of every input at once.
        import random

        subject = self.subject(target, width=24)
        tensors = self.inputs(subject, subject.batch(range(6)), backward)
        expected = self.run(subject, tensors, backward)
        for seed in range(25):
            rng = random.Random(seed)
            views = [random_view(t, rng) for t in tensors]
            with dispatch.policy("silent"):
                got = self.run(subject, views, backward)
            assert_all_same(expected, got, f"seed {seed}, strides {[v.stride() for v in views]}")

    def test_copies_are_announced(self, target: Target) -> None:
        subject = self.subject(target)
        tensors = self.forward_inputs(subject, subject.batch(range(4)))
        index, arg = next((i, a) for i, a in enumerate(self.spec.forward.inputs) if a.rows and a.axes)
        tensors[index] = LAYOUTS["column_step"](tensors[index])  # type: ignore[assignment]
        with (
            dispatch.policy("strict"),
            pytest.raises(UnsupportedError, match=rf"{arg.name} \(last axis has stride 2\)"),
        ):
            self.run(subject, tensors, backward=False)
        self.operator._told.clear()
        with pytest.warns(UserWarning, match=rf"copied to a dense layout: {arg.name}"):
            self.run(subject, tensors, backward=False)

    def test_results_are_contiguous_and_as_declared(
        self, target: Target, lead: tuple[int, ...], backward: bool
    ) -> None:
        # A10, E19: shape, dtype and strides are functions of the declaration alone; results alias nothing.
        subject = self.subject(target)
        count = 1
        for size in lead:
            count *= size
        args = self.spec.direction(backward).inputs
        flat = self.inputs(subject, subject.batch(range(count)), backward)
        shaped = [t.view((*lead, *t.shape[1:])) if arg.rows else t for arg, t in zip(args, flat, strict=True)]
        expected = self.run(subject, flat, backward)
        storages = {t.untyped_storage().data_ptr() for t in flat}
        for name, value in self.run(subject, shaped, backward).items():
            declared = self.spec.direction(backward).result(name)
            shape = tuple(subject.sizes[axis] for axis in declared.axes)
            assert value.shape == ((*lead, *shape) if declared.rows else shape)
            assert value.is_contiguous()
            assert value.dtype == (torch.float32 if declared.dtype == "grad" else DTYPES[declared.dtype])
            assert value.untyped_storage().data_ptr() not in storages
            assert_same(expected[name].view(value.shape), value, name)

    # --- empty (B) ------------------------------------------------------------------------------------------------

    def test_no_rows(self, target: Target, contract: str, backward: bool) -> None:
        # B1, B2, B3, B8: empty row results; gradients that sum over rows are zeros, not leftovers.
        subject = self.subject(target, contract)
        args = self.spec.direction(backward).inputs
        flat = self.inputs(subject, subject.batch([]), backward)
        for lead in EMPTY_LEADS:
            shaped = [t.view((*lead, *t.shape[1:])) if arg.rows else t for arg, t in zip(args, flat, strict=True)]
            for name, value in self.run(subject, shaped, backward).items():
                declared = self.spec.direction(backward).result(name)
                if declared.rows:
                    assert value.shape == (*lead, *(subject.sizes[axis] for axis in declared.axes))
                else:
                    assert_same(torch.zeros_like(value), value, name)

    def test_no_rows_through_autograd(self, target: Target) -> None:
        subject = self.subject(target)
        batch = subject.batch([])
        leaves = self.leaves(subject, batch)
        for name, grad in self.differentiate(subject, leaves, batch).items():
            assert_same(torch.zeros_like(leaves[name]), grad, name)

    def test_free_axes_have_limits(self, target: Target) -> None:
        # B14, B12: no empty rows, none longer than was declared. Expanded tensors, so that no memory is needed.
        subject = self.subject(target)
        for axis, least, most in self.spec.size_limits:
            for size in (least - 1, most + 1):
                tensors = self.forward_inputs(subject, subject.batch(range(3)))
                for index, arg in enumerate(self.spec.forward.inputs):
                    if axis in arg.axes:
                        at = arg.axes.index(axis) + arg.rows
                        shape = list(tensors[index].shape)
                        shape[at] = size
                        tensors[index] = tensors[index].narrow(at, 0, 1).expand(shape)
                self._refused(subject, tensors, False, ValueError, f"{axis} = {size} is outside {least} .. {most}")

    # --- 32-bit offsets (C) ---------------------------------------------------------------------------------------

    @pytest.mark.gpu
    @pytest.mark.big
    def test_offsets_beyond_32_bits(self, target: Target, backward: bool) -> None:
        # C1, C2, C5: rows below, at and above element 2^31 of the largest tensor.
        subject = self.subject(target, width=4096, rows=8)
        direction = self.spec.direction(backward)
        tensors: list[TensorArg | Result] = [*direction.inputs, *direction.results]
        largest = max(self._row_size(item, subject.sizes) for item in tensors if item.rows)
        boundary = 2**31 // largest
        count = boundary + 9
        small = self.inputs(subject, subject.batch(range(8)), backward)
        big = [
            t[torch.arange(count, device=t.device) % 8] if arg.rows else t
            for arg, t in zip(direction.inputs, small, strict=True)
        ]
        wanted = [r.rows for r in direction.results]
        options: dict[str, Any] = {"wanted": wanted} if backward else {}
        expected = self.run(subject, small, backward, **options)
        got = self.run(subject, big, backward, **options)
        del big
        for name, value in got.items():
            for row in (0, 1, 2, 3, boundary - 1, boundary, boundary + 1, count - 2, count - 1):
                assert_same(expected[name][row % 8], value[row], f"{name}, row {row} of {count}")

    def _row_size(self, item: TensorArg | Result, sizes: dict[str, int]) -> int:
        size = 1
        for axis in item.axes:
            size *= sizes[axis]
        return size

    # --- refusals -------------------------------------------------------------------------------------------------

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

    def test_wrong_tensors_are_refused_by_name(self, target: Target, arg: tuple[bool, TensorArg]) -> None:
        backward, declared = arg
        subject = self.subject(target)
        good = self.inputs(subject, subject.batch(range(5)), backward)
        args = self.spec.direction(backward).inputs
        at = args.index(declared)

        def refuse(value: Any, error: type[Exception], *words: str) -> None:
            bad: list[Any] = list(good)
            bad[at] = value
            self._refused(subject, bad, backward, error, declared.name, *words)

        refuse(good[at].double(), TypeError, *(f"torch.{name}" for name in declared.dtypes))
        refuse(good[at].tolist(), TypeError, "torch.Tensor")
        if not declared.optional:
            refuse(None, TypeError)
        fixed, names = dict(self.spec.fixed_sizes), list(declared.axes)
        offset = good[at].dim() - len(names)
        if names:
            refuse(good[at].new_zeros(()), ValueError, "shape")
        for index, axis in enumerate(names):
            longer = torch.cat([good[at], good[at].narrow(index + offset, 0, 1)], dim=index + offset)
            if axis in fixed:
                refuse(longer, ValueError, f"must be {fixed[axis]}")
            elif any(axis in other.axes for other in args if other is not declared):
                self._refused(
                    subject, [longer if i == at else t for i, t in enumerate(good)], backward, ValueError, f"{axis} = "
                )
        if declared.rows and sum(other.rows for other in args) > 1:
            longer = torch.cat([good[at], good[at][:1]])
            bad = [longer if i == at else t for i, t in enumerate(good)]
            self._refused(subject, bad, backward, ValueError, "batch shape", "(6,)", "(5,)")
        if len(args) > 1:
            bad = [t.to("meta") if i == at else t for i, t in enumerate(good)]
            self._refused(subject, bad, backward, ValueError, "meta")

    def test_wrong_options_are_refused_by_name(self, target: Target, backward: bool) -> None:
        subject = self.subject(target)
        good = self.inputs(subject, subject.batch(range(5)), backward)
        contracts = [repr(c.name) for c in self.spec.contracts]
        self._refused(subject, good, backward, ValueError, "'nonsense'", *contracts, contract="nonsense")
        backends = [repr(b.name) for b in self.spec.backends]
        self._refused(subject, good, backward, ValueError, "'nonsense'", *backends, backend="nonsense")
        self._refused(subject, good[:-1], backward, TypeError, f"expected {len(good)} tensors")
        self._refused(subject, good, backward, TypeError, "unknown argument", nonsense=1.0)
        if backward:
            self._refused(subject, good, backward, ValueError, "wanted", wanted=[True] * 9)
            self._refused(subject, good, backward, TypeError, "grad_dtype", grad_dtype=torch.float16)
        for scalar in self.spec.scalars:
            # E5
            for value in (float("nan"), float("inf"), -1.0, scalar.minimum / 2):
                self._refused(
                    subject, good, backward, ValueError, scalar.name, f"{scalar.minimum:g}", **{scalar.name: value}
                )
            self._refused(subject, good, backward, TypeError, scalar.name, **{scalar.name: "1"})
        if target.device == "cpu":
            for declared in self.spec.backends:
                if declared.min_arch is not None:
                    words = (repr(declared.name), "needs a CUDA tensor")
                    self._refused(subject, good, backward, UnsupportedError, *words, backend=declared.name)

    def test_scalars_are_honoured(self, target: Target, contract: str) -> None:
        # E4
        subject = self.subject(target, contract, pattern="small_mean")
        batch = subject.batch(range(subject.rows))
        tensors = self.forward_inputs(subject, batch)
        usual = self.run(subject, tensors, backward=False)
        for scalar in self.spec.scalars:
            for value in (scalar.minimum, 10 * scalar.default, 1e4 * scalar.default):
                scalars = subject.scalars | {scalar.name: value}
                got = self.run(subject, tensors, backward=False, **{scalar.name: value})
                assert any(first_difference(usual[name], got[name]) for name in got), (
                    f"{scalar.name} = {value} is ignored"
                )
                for name, golden in subject._golden.forward(batch.rows | batch.shared, scalars).items():
                    _, excess = judge(got[name], golden, subject.tolerance(name, got[name].dtype, False))
                    assert excess is None, f"{name} with {scalar.name} = {value}: {excess}"

    # --- explicit backward ----------------------------------------------------------------------------------------

    def test_only_what_is_wanted(self, target: Target, contract: str) -> None:
        # F4, for the explicit backward
        subject = self.subject(target, contract)
        tensors = self.inputs(subject, subject.batch(range(9)), True)
        full = self.run(subject, tensors, backward=True)
        for mask in itertools.product((False, True), repeat=len(self.spec.backward.results)):
            got = self.run(subject, tensors, backward=True, wanted=mask)
            names = {r.name for r, on in zip(self.spec.backward.results, mask, strict=True) if on}
            assert_all_same({n: v for n, v in full.items() if n in names}, got, str(mask))

    def test_absent_inputs_mean_zeros(self, target: Target, contract: str) -> None:
        subject = self.subject(target, contract)
        tensors = self.inputs(subject, subject.batch(range(9)), True)
        for index, arg in enumerate(self.spec.backward.inputs):
            if arg.optional:
                absent: list[Tensor | None] = [None if i == index else t for i, t in enumerate(tensors)]
                zeros = [torch.zeros_like(t) if i == index else t for i, t in enumerate(tensors)]
                assert_all_same(self.run(subject, zeros, True), self.run(subject, absent, True), f"without {arg.name}")

    # --- autograd (F) ---------------------------------------------------------------------------------------------

    def test_every_subset_of_leaves(self, target: Target, contract: str, subset: tuple[bool, ...]) -> None:
        # F3, F4, F12: every leaf that asks gets its gradient, in its own dtype, and the bits of the full run; no other does.
        subject = self.subject(target, contract)
        batch = subject.batch(range(9))
        full = self.differentiate(subject, self.leaves(subject, batch), batch)
        leaves = self.leaves(subject, batch)
        assert full.keys() == leaves.keys()
        for arg, on in zip(self.spec.forward.inputs, subset, strict=True):
            leaves[arg.name].requires_grad_(on)
        if not any(subset):
            results = self.run(subject, [leaves[a.name] for a in self.spec.forward.inputs], backward=False)
            assert not any(value.requires_grad for value in results.values())
            return
        got = self.differentiate(subject, leaves, batch)
        wanted = {a.name for a, on in zip(self.spec.forward.inputs, subset, strict=True) if on}
        assert_all_same({n: v for n, v in full.items() if n in wanted}, got, "a subset of leaves")
        assert all(grad.dtype == leaves[name].dtype for name, grad in got.items())

    def test_autograd_is_the_explicit_backward(self, target: Target, contract: str) -> None:
        subject = self.subject(target, contract)
        both = subject.autograd(subject.batch(range(33)))
        assert both is not None
        assert_all_same(both[1], both[0], "autograd")

    def test_hidden_results_carry_no_gradient(self, target: Target) -> None:
        subject = self.subject(target)
        leaves = self.leaves(subject, subject.batch(range(3)))
        results = self.run(subject, [leaves[a.name] for a in self.spec.forward.inputs], backward=False)
        for declared in self.spec.forward.results:
            assert results[declared.name].requires_grad == (not declared.hidden)

    def test_missing_upstream_means_zeros(self, target: Target) -> None:
        subject = self.subject(target)
        batch = subject.batch(range(9))
        for kept in self.public():
            got = self.differentiate(subject, self.leaves(subject, batch), batch, [kept.name])
            upstream = {n: v if n == kept.name else torch.zeros_like(v) for n, v in batch.upstream.items()}
            zeros = Batch(batch.ids, batch.rows, batch.shared, upstream)
            expected = self.differentiate(subject, self.leaves(subject, batch), zeros)
            assert_all_same(expected, got, f"upstream of {kept.name} only")

    def test_expanded_upstream(self, target: Target) -> None:
        # A1, A5: .sum().backward() hands over a gradient with stride 0.
        subject = self.subject(target)
        batch = subject.batch(range(9))
        ones = {n: torch.ones_like(v) for n, v in batch.upstream.items()}
        expected = self.differentiate(
            subject, self.leaves(subject, batch), Batch(batch.ids, batch.rows, batch.shared, ones)
        )
        leaves = self.leaves(subject, batch)
        results = self.run(subject, [leaves[a.name] for a in self.spec.forward.inputs], backward=False)
        with dispatch.policy("silent"):
            torch.autograd.backward([results[r.name].sum() for r in self.public()])
        assert_all_same(expected, {n: t.grad for n, t in leaves.items() if t.grad is not None}, "expanded upstream")

    def test_inputs_are_left_alone(self, target: Target, contract: str) -> None:
        # A13, F1: nothing is written into inputs, saved tensors or upstream gradients, in either direction.
        subject = self.subject(target, contract)
        drawn = subject.batch(range(9))
        results = subject.forward(drawn)
        upstream = {name: value.to(results[name].dtype, copy=True) for name, value in drawn.upstream.items()}
        batch = Batch(drawn.ids, drawn.rows, drawn.shared, upstream)
        leaves = self.leaves(subject, batch)
        explicit = dict(enumerate(t.clone() for t in self.backward_inputs(subject, drawn)))
        groups: list[dict[Any, Tensor]] = [leaves, upstream, explicit]
        before = [{key: (t.detach().clone(), t._version) for key, t in group.items()} for group in groups]
        self.differentiate(subject, leaves, batch)
        self.run(subject, list(explicit.values()), backward=True)
        for group, old in zip(groups, before, strict=True):
            for key, (value, version) in old.items():
                assert_same(value, group[key], f"{key} after the call")
                assert group[key]._version == version, f"{key} was written"

    def test_gradient_of_what_came_before(self, target: Target) -> None:
        # F1: an op that saved its output, in front of ours.
        subject = self.subject(target)
        batch = subject.batch(range(9))
        roots = {n: leaf(v) for n, v in (batch.rows | batch.shared).items()}
        mid = {n: torch.sigmoid(r) for n, r in roots.items()}
        inner = self.differentiate(subject, {n: leaf(m) for n, m in mid.items()}, batch)
        expected = dict(
            zip(
                roots,
                torch.autograd.grad([mid[n] for n in inner], list(roots.values()), list(inner.values())),
                strict=True,
            )
        )
        mid = {n: torch.sigmoid(r) for n, r in roots.items()}
        results = self.run(subject, [mid[a.name] for a in self.spec.forward.inputs], backward=False)
        upstream = {n: v.to(results[n].dtype) for n, v in batch.upstream.items()}
        assert_all_same(expected, gradients(results, roots, upstream), "through sigmoid")

    def test_double_backward_is_refused(self, target: Target) -> None:
        # F7
        subject = self.subject(target)
        batch = subject.batch(range(3))
        leaves = self.leaves(subject, batch)
        results = self.run(subject, [leaves[a.name] for a in self.spec.forward.inputs], backward=False)
        total = torch.stack([results[r.name].float().sum() for r in self.public()]).sum()
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(total, list(leaves.values()), create_graph=True)
        tensors = [t.detach().clone().requires_grad_() for t in self.inputs(subject, batch, True)]
        with pytest.raises(RuntimeError, match="double backward"):
            self.run(subject, tensors, backward=True)

    def test_inference_mode(self, target: Target) -> None:
        # F9
        subject = self.subject(target)
        batch = subject.batch(range(5))
        tensors = self.forward_inputs(subject, batch)
        expected = self.run(subject, tensors, backward=False)
        with torch.inference_mode():
            assert_all_same(expected, self.run(subject, [t.clone() for t in tensors], backward=False), "inference mode")
            made = [t.clone() for t in tensors]
        for index, arg in enumerate(self.spec.forward.inputs):
            leaves = [made[i] if i == index else leaf(t) for i, t in enumerate(tensors)]
            if len(leaves) > 1:
                with pytest.raises(RuntimeError, match=f"{arg.name} was created under torch.inference_mode"):
                    self.run(subject, leaves, backward=False)

    def test_autocast_changes_nothing(self, target: Target) -> None:
        # F12
        subject = self.subject(target)
        batch = subject.batch(range(5))
        expected = self.differentiate(subject, self.leaves(subject, batch), batch)
        results = subject.forward(batch)
        with torch.autocast(target.device, dtype=torch.bfloat16):
            assert_all_same(results, subject.forward(batch), "autocast")
            assert_all_same(expected, self.differentiate(subject, self.leaves(subject, batch), batch), "autocast")

    def test_accumulated_gradients_repeat(self, target: Target) -> None:
        # F10: grad(a) + grad(b) by autograd's accumulation; the same bits every time (not those of one batch a+b).
        subject = self.subject(target)
        runs = []
        for _ in range(2):
            leaves = self.leaves(subject, subject.batch([]))
            shared = {n: t for n, t in leaves.items() if n in subject.batch([]).shared}
            for ids in (range(5), range(5, 12)):
                batch = subject.batch(ids)
                mixed = {n: leaf(v) for n, v in batch.rows.items()} | shared
                results = self.run(subject, [mixed[a.name] for a in self.spec.forward.inputs], backward=False)
                names = [r.name for r in self.public()]
                torch.autograd.backward(
                    [results[n] for n in names], [batch.upstream[n].to(results[n].dtype) for n in names]
                )
            runs.append({n: t.grad for n, t in shared.items() if t.grad is not None})
        assert_all_same(runs[0], runs[1], "accumulated gradients")

    # --- memory that is not ours ----------------------------------------------------------------------------------

    def test_results_are_fully_written(self, target: Target, contract: str, backward: bool) -> None:
        # A5, B3: torch fills fresh memory with NaN here, so an element that nobody wrote is seen.
        subject = self.subject(target, contract)
        cases = [self.inputs(subject, subject.batch(range(n)), backward) for n in (1, 9, 33)]
        expected = [self.run(subject, tensors, backward) for tensors in cases]
        if target.device == "cuda":
            for size in (2**10, 2**14, 2**18, 2**22):
                torch.full((size,), float("nan"), device=target.device)  # freed at once, and handed out again
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            for tensors, results in zip(cases, expected, strict=True):
                assert_all_same(results, self.run(subject, tensors, backward), "on poisoned memory")
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]

    # --- torch's own machinery (G) --------------------------------------------------------------------------------

    def _op_arguments(self, subject: OperatorSubject, tensors: Sequence[Tensor], backward: bool) -> tuple[Any, ...]:
        rest: list[Any] = [*tensors, *subject.scalars.values(), subject.contract, subject.backend]
        return (*rest, "float32", [True] * len(self.spec.backward.results)) if backward else tuple(rest)

    def test_opcheck(self, target: Target, backward: bool) -> None:
        # G1: schema, fake kernel, autograd registration; also with a transposed input.
        op = getattr(torch.ops.samebits, f"{self.op}_backward" if backward else self.op).default
        subject = self.subject(target, width=24)
        for lay in (None, LAYOUTS["rows_innermost"]):
            tensors = self.inputs(subject, subject.batch(range(4)), backward)
            views = [t if lay is None else (lay(t) if lay(t) is not None else t) for t in tensors]
            if not backward:
                views = [v.detach().requires_grad_() for v in views if v is not None]
            with dispatch.policy("silent"):
                torch.library.opcheck(op, self._op_arguments(subject, [v for v in views if v is not None], backward))

    def test_compiled_without_graph_breaks(self, target: Target, contract: str) -> None:
        # G3, F: one graph, symbolic T, then another T and T = 1; results and gradients bit for bit.
        subject = self.subject(target, contract, width=24)
        names = [r.name for r in self.public()]
        public = self.public_function()
        contract, backend = subject.contract, subject.backend

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = public(*tensors, contract=contract, backend=backend)
            return (results,) if isinstance(results, Tensor) else tuple(results)

        torch._dynamo.reset()
        engine = "inductor" if target.device == "cuda" else "aot_eager"
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=engine)
        for count in (40, 8, 3, 1):
            batch = subject.batch(range(count))
            eager, traced = self.leaves(subject, batch), self.leaves(subject, batch)
            outputs = []
            for function, leaves in ((step, eager), (compiled, traced)):
                values = dict(zip(names, function(*(leaves[a.name] for a in self.spec.forward.inputs)), strict=True))
                upstream = {n: batch.upstream[n].to(values[n].dtype) for n in names}
                outputs.append((values, gradients(values, leaves, upstream)))
            assert_all_same(outputs[0][0], outputs[1][0], f"compiled, {count} rows")
            assert_all_same(outputs[0][1], outputs[1][1], f"gradients compiled, {count} rows")

    @pytest.mark.gpu
    def test_cuda_graph(self, target: Target, contract: str, backward: bool) -> None:
        # G4, G5: capture (which a host sync would break), then replay on new data.
        for width, count in ((self.width, 1), (self.width, 33), (4096, 128)):
            subject = self.subject(target, contract, width, rows=256)
            static = [t.clone() for t in self.inputs(subject, subject.batch(range(count)), backward)]
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.run(subject, static, backward)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self.run(subject, static, backward)
            for start in (128, 64, 0):
                fresh = self.inputs(subject, subject.batch(range(start, start + count)), backward)
                for old, new in zip(static, fresh, strict=True):
                    old.copy_(new)
                graph.replay()
                torch.cuda.synchronize()
                assert_all_same(self.run(subject, fresh, backward), results, f"replay with rows from {start}")

    @pytest.mark.gpu
    def test_no_host_synchronisation(self, target: Target, backward: bool) -> None:
        # G5
        subject = self.subject(target)
        tensors = self.inputs(subject, subject.batch(range(33)), backward)
        self.run(subject, tensors, backward)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(subject, tensors, backward)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.gpu
    def test_runs_on_the_current_stream(self, target: Target, backward: bool) -> None:
        # G6: a slow producer, our operator and a consumer on a side stream, a hundred times.
        subject = self.subject(target, rows=128)
        sources = self.inputs(subject, subject.batch(range(128)), backward)
        expected = self.run(subject, sources, backward)
        busy = torch.zeros(2**24, device=target.device)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        for _ in range(100):
            with torch.cuda.stream(stream):
                late = [torch.full_like(s, float("nan")) for s in sources]
                busy.add_(1.0)
                for slot, source in zip(late, sources, strict=True):
                    slot.copy_(source)
                results = self.run(subject, late, backward)
                consumed = {name: value.clone() for name, value in results.items()}
            stream.synchronize()
            assert_all_same(expected, consumed, "on a side stream")

    @pytest.mark.gpu
    @pytest.mark.multi_gpu
    def test_runs_on_the_device_of_its_inputs(self, target: Target, backward: bool) -> None:
        # G8: tensors on cuda:1 while cuda:0 is current.
        first = self.subject(target)
        second = self.subject(Target(target.backend, "cuda:1"))
        expected = self.run(first, self.inputs(first, first.batch(range(33)), backward), backward)
        with torch.cuda.device(0):
            got = self.run(second, self.inputs(second, second.batch(range(33)), backward), backward)
            assert torch.cuda.current_device() == 0
        assert_all_same(expected, {name: value.to("cuda:0") for name, value in got.items()}, "on cuda:1")


def random_view(tensor: Tensor, rng: Any) -> Tensor:
    """The same values in a random layout: permuted axes, steps, gaps and an offset; NaN everywhere else."""
    if tensor.dim() == 0:
        return tensor
    order = rng.sample(range(tensor.dim()), tensor.dim()) if rng.random() < 0.5 else list(range(tensor.dim()))
    steps = [rng.choice((1, 1, 1, 2, 3)) for _ in order]
    gaps = [rng.choice((0, 0, 1, 8, 16)) for _ in order]
    offset = rng.choice((0, 0, 1, 2, 8))
    shape = [tensor.shape[axis] * step + gap for axis, step, gap in zip(order, steps, gaps, strict=True)]
    count = 1
    for size in shape:
        count *= size
    flat = torch.full((offset + count,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    box = flat[offset:].view(shape)
    for dim, (axis, step) in enumerate(zip(order, steps, strict=True)):
        box = box.narrow(dim, 0, tensor.shape[axis] * step)
        box = box[(slice(None),) * dim + (slice(None, None, step),)]
    view = box.permute([order.index(axis) for axis in range(tensor.dim())])
    view.copy_(tensor)
    return view
