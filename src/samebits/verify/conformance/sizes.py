"""Empty, extreme and very large sizes (kinds B and C of the hostile inputs)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebits.contract import Result, TensorArg
from samebits.verify.conformance.base import Base, Target, assert_same

OFFSET_LIMIT = 2**31
"""Elements that a signed 32-bit offset can reach."""
EMPTY_LEADS = ((0,), (0, 3), (3, 0))


class Sizes(Base):
    # --- empty (B) ------------------------------------------------------------------------------------------------

    def test_no_rows(self, target: Target, contract: str, backward: bool) -> None:
        # B1, B2, B3, B8: empty row results; gradients that sum over rows are zeros, not leftovers; nothing is launched.
        subject = self.subject(target, contract)
        args = self.spec.direction(backward).inputs
        flat = self.inputs(subject, subject.batch([]), backward)
        for lead in EMPTY_LEADS:
            shaped = [t.view((*lead, *t.shape[1:])) if arg.rows else t for arg, t in zip(args, flat, strict=True)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.operator.backend(subject.backend or ""), "run", self._nothing_to_run)
                results = self.run(subject, shaped, backward)
            for name, value in results.items():
                declared = self.spec.direction(backward).result(name)
                if declared.rows:
                    assert value.shape == (*lead, *(subject.sizes[axis] for axis in declared.axes))
                else:
                    assert_same(torch.zeros_like(value), value, name)

    @staticmethod
    def _nothing_to_run(*arguments: Any) -> None:
        raise AssertionError("a call without rows was launched")

    def test_no_rows_through_autograd(self, target: Target) -> None:
        # B3
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
        # C1, C2, C5, C6: rows below, at and above element 2^31 of the largest tensor.
        subject = self.subject(target, width=4096, rows=8)
        direction = self.spec.direction(backward)
        tensors: list[TensorArg | Result] = [*direction.inputs, *direction.results]
        largest = max(self._row_size(item, subject.sizes) for item in tensors if item.rows)
        boundary = OFFSET_LIMIT // largest
        count = boundary + 9
        small = self.inputs(subject, subject.batch(range(8)), backward)
        big = [
            t[torch.arange(count, device=t.device) % 8] if arg.rows else t
            for arg, t in zip(direction.inputs, small, strict=True)
        ]
        big = self.consistent(subject, big, backward)
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
