"""Strides, offsets, overlaps (kinds A, C3 and D of the hostile inputs)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from samebits import dispatch
from samebits.checks import DTYPES
from samebits.dispatch import UnsupportedError
from samebits.verify.conformance.base import Base, Target, assert_all_same, assert_same
from samebits.verify.layouts import LAYOUTS, first_row_far_stride, first_row_odd_stride, poisoned, random_view
from samebits.verify.operators import OperatorSubject


class Layout(Base):
    def _assert_layout(
        self, subject: OperatorSubject, tensors: list[Tensor], backward: bool, change: Callable[[Tensor], Tensor | None]
    ) -> bool:
        args = self.spec.direction(backward).inputs
        views = [change(tensor) for tensor in tensors]
        for index, (arg, view) in enumerate(zip(args, views, strict=True)):
            if arg.derived and view is not None and not torch.equal(view, tensors[index]):
                views[index] = None  # other values would be no longer what follows from the inputs
        cases = [[index] for index, view in enumerate(views) if view is not None]
        if not cases:
            return False
        for changed in [*cases, [case[0] for case in cases]]:
            mixed = [views[i] if i in changed else t for i, t in enumerate(tensors)]
            alone = changed if len(changed) == 1 else ()  # together with other values it would not follow from them
            given = self.consistent(subject, [t for t in mixed if t is not None], backward, alone)
            dense = [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in given]
            with dispatch.policy("silent"):
                got = self.run(subject, given, backward)
            what = ", ".join(args[i].name for i in changed)
            assert all(value.is_contiguous() for value in got.values()), f"strides of a result, layout of {what}"
            assert_all_same(self.run(subject, dense, backward), got, f"layout of {what}")
            for result, before in zip(given, dense, strict=True):
                if result is not None and before is not None:
                    assert_same(before, result, "an input after the call")
        return True

    def test_layouts(self, target: Target, layout: str, backward: bool) -> None:
        # A1, A2, A3, A5, A8, A10, D1, D4: each input in a foreign layout alone, shared weights too, then all of them together.
        for width in self.widths(1, 17, self.width, *((4096,) if target.device == "cuda" else ())):
            subject = self.subject(target, width=width, rows=12)
            tensors = self.inputs(subject, subject.batch(range(12)), backward)
            made = self._assert_layout(subject, tensors, backward, LAYOUTS[layout])
            assert made or max(t.dim() for t in tensors) < 2  # some layouts are of rows with columns

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
        for stride in (first_row_far_stride, first_row_odd_stride):
            made = self._assert_layout(subject, tensors, backward, stride)
            assert made or max(t.dim() for t in tensors) < 2

    def test_batch_axes_in_any_order(self, target: Target, backward: bool) -> None:
        # A7: the row pitch of a three-dimensional slice; A2: permuted batch axes.
        subject = self.subject(target)
        args = self.spec.direction(backward).inputs
        flat = self.inputs(subject, subject.batch(range(12)), backward)
        shaped = [t.view(3, 4, *t.shape[1:]) if arg.rows else t for arg, t in zip(args, flat, strict=True)]

        def slice_of_longer(t: Tensor) -> Tensor:
            wide = poisoned(t, (3, 9, *t.shape[2:]))
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
        # A2, A11 (never square): seeded random permutations, steps, pitches and offsets of every input at once.
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
        index, arg = next((i, a) for i, a in enumerate(self.spec.forward.inputs) if a.axes)
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
            own = {"grad": torch.float32} | DTYPES | subject.dtypes
            assert value.dtype == own[declared.dtype]
            assert value.untyped_storage().data_ptr() not in storages
            assert_same(expected[name].view(value.shape), value, name)
