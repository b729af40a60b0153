"""The bits of the contract at every size; accuracy beside them; invariance."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from samebits import dispatch
from samebits.checks import dtype_name
from samebits.verify.check import check
from samebits.verify.conformance.base import Base, Target, assert_same
from samebits.verify.conformance.comparisons import Comparisons
from samebits.verify.inputs import FINITE_PATTERNS, PATTERNS
from samebits.verify.operators import OperatorSubject
from samebits.verify.quick import quick_folds
from samebits.verify.tolerance import judge

ROWS = (0, 1, 7, 16, 33, 70, 128, 129, 257, 300)
ODD_WIDTHS = (1, 17, 63, 127, 129, 136)
WIDE_WIDTHS = (4096, 7168)
VERY_WIDE_WIDTHS = (8193, 16384, 40000, 131072)
"""From rows that do not fit beside others into shared memory to rows that do not fit at all and come in chunks."""
UNTUNED_WIDTHS = (3584, 4095, 4097)
"""A whole number of vectors that is no tuned size, and one element less and more than a tuned one."""


class Bits(Base):
    batch_sizes: ClassVar[tuple[Sequence[int], Sequence[int]]] = (ROWS, (0, 1, 7, 33))
    """On a GPU and on a CPU; so are the next two. An operator whose reference takes long tries fewer."""
    odd_widths: ClassVar[tuple[Sequence[int], Sequence[int]]] = (ODD_WIDTHS, (1, 17, 136))
    wide_patterns: ClassVar[tuple[Sequence[str], Sequence[str]]] = (PATTERNS, ("normal",))
    wide_widths: ClassVar[Sequence[int]] = WIDE_WIDTHS
    accuracy_widths: ClassVar[tuple[Sequence[int], Sequence[int]]] = ((1, 17, 136, 1000), (1, 17, 136, 1000))
    very_wide_widths: ClassVar[tuple[Sequence[int], Sequence[int]]] = (
        (*UNTUNED_WIDTHS, *VERY_WIDE_WIDTHS),
        (*UNTUNED_WIDTHS, VERY_WIDE_WIDTHS[0]),
    )

    def _assert_bits(
        self, target: Target, contract: str, pattern: str, width: int, rows: Sequence[int], quick: bool = False
    ) -> None:
        """Every batch size, launch plan and gradient dtype has the bits that the reference has for the largest batch.

        ``quick``: the reference folds in one call, because the rows are too long for one call per addition; on a GPU always.
        """
        judging = quick_folds if quick or target.device != "cpu" else contextlib.nullcontext
        compared = Comparisons()
        most = max(rows)
        for dtype in self.upstream_dtypes(contract):
            subject = self.subject(target, contract, width, pattern, dtype, rows=most)
            judge_of = self.subject(Target("reference", target.device), contract, width, pattern, dtype, rows=most)
            whole = judge_of.batch(range(most))
            with judging():
                saved = self.run(judge_of, self.forward_inputs(judge_of, whole), backward=False)
                exact = self.run(judge_of, judge_of.backward_inputs(whole, saved), backward=True)
            row_names = [r.name for r in self.spec.backward.results if r.rows]
            for count in rows:
                batch = subject.batch(range(count))
                forward = self.forward_inputs(subject, batch)
                backward = subject.backward_inputs(batch, {n: v[:count] for n, v in saved.items()})
                with judging():
                    summed = self.run(
                        judge_of, backward, backward=True, wanted=[not r.rows for r in self.spec.backward.results]
                    )
                expected = {n: exact[n][:count] for n in row_names} | summed
                for index in range(self._plan_count(subject, forward, False)):
                    with dispatch.force_plan(index):
                        got = self.run(subject, forward, backward=False)
                    stored = {n: v[:count] for n, v in saved.items()}
                    compared.add(stored, got, f"forward, {count} rows, plan {index}")
                for index in range(self._plan_count(subject, backward, True)):
                    for grad_dtype in self.gradient_dtypes(subject):
                        with dispatch.force_plan(index):
                            got = self.run(subject, backward, backward=True, grad_dtype=grad_dtype)
                        rounded = {n: v.to(got[n].dtype) for n, v in expected.items()}
                        what = f"backward, {count} rows, plan {index}, {dtype_name(grad_dtype)}, upstream {dtype or 'first'}"
                        compared.add(rounded, got, what)
            compared.settle()

    def _plan_count(self, subject: OperatorSubject, tensors: Sequence[Tensor], backward: bool) -> int:
        ready = self.operator.prepare(
            backward, tensors, list(subject.scalars.values()), subject.contract, subject.backend
        )
        return len(self.operator.backend(ready.choice.backend).plans(ready.call))

    def test_bits_of_every_batch_size(self, target: Target, contract: str, pattern: str) -> None:
        # H1, H3, B13: a threshold in the launch must not show. D5, D6: tails and tiles of every kind.
        # E2 (huge), E8 (nan), E9 (minus_zero), E10 (subnormal, tiny): every pattern of values, on every backend.
        on_cpu = target.device == "cpu"
        for width in self.widths(*self.odd_widths[on_cpu]):
            self._assert_bits(target, contract, pattern, width, self.batch_sizes[on_cpu])

    def test_bits_of_wide_rows(self, target: Target, contract: str) -> None:
        on_cpu = target.device == "cpu"
        for width in self.widths(*self.wide_widths):
            for pattern in self.wide_patterns[on_cpu]:
                self._assert_bits(target, contract, pattern, width, (1, 3) if on_cpu else self.batch_sizes[0])

    def test_bits_of_very_wide_rows(self, target: Target, contract: str) -> None:
        # B11: more than one block's shared memory holds. D3, D5: widths nobody tuned for.
        for width in self.widths(*self.very_wide_widths[target.device == "cpu"]):
            self._assert_bits(target, contract, "normal", width, (1, 3), quick=True)

    def test_accuracy(self, target: Target, contract: str) -> None:
        # H16, E4, E13, E17: an independent FP64 golden, random weights, awkward rows.
        widths = self.accuracy_widths[target.device == "cpu"]
        for width, pattern in itertools.product(self.widths(*widths), FINITE_PATTERNS):
            subject = self.subject(target, contract, width, pattern)
            batch = subject.batch(range(subject.rows))
            for gradient in (False, True):
                values = subject.backward(batch) if gradient else subject.forward(batch)
                for name, golden in subject.golden(batch, gradient).items():
                    _, excess = judge(values[name], golden, subject.tolerance(name, values[name].dtype, gradient))
                    assert excess is None, f"{name}, width {width}, {pattern}: {excess}"

    def test_check_passes(self, target: Target, contract: str) -> None:
        # H1, H3, H13: batch sizes, chunks, positions, permutations, padding, repetition.
        short = target.device == "cpu" or target.backend == "reference"  # whose folds are thousands of small kernels
        report = check(
            self.op, contract=contract, backend=target.backend, device=target.device,
            sizes=self.free_sizes(self.width), rows=20 if short else 300,
        )  # fmt: skip
        four = {name: status for name, status in report.status().items() if name != "reference_bits"}
        assert set(four.values()) == {"pass"}, report.checks
        assert report.check("reference_bits").status == ("n/a" if target.backend == "reference" else "pass"), (
            report.checks
        )

    def test_special_rows_leave_their_neighbours_alone(self, target: Target, contract: str) -> None:
        # E6, E9, E10, H8: rows of zeros, NaN, infinities beside ordinary rows.
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
        # B9, B5: launch-grid limits and scratch sizes. E13: long sums in FP32.
        # B6: the sum over rows alone, without the gradient beside it.
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
        summed = [not r.rows for r in self.spec.backward.results]
        if any(summed):
            tensors = self.backward_inputs(subject, batch)
            judge_of = self.subject(Target("reference", target.device), width=8, rows=257)
            with quick_folds():
                expected = self.run(judge_of, tensors, backward=True, wanted=summed)
            for name, value in self.run(subject, tensors, backward=True, wanted=summed).items():
                assert_same(expected[name], value, f"{name} of {many} rows")
