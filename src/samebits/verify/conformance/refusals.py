"""What is not accepted is refused by name, and what is passed is honoured."""

from __future__ import annotations

from typing import Any

import torch

from samebits.checks import DTYPES
from samebits.contract import TensorArg
from samebits.dispatch import UnsupportedError
from samebits.exact.compare import first_difference
from samebits.verify.conformance.base import Base, Target
from samebits.verify.tolerance import judge


class Refusals(Base):
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

        # E1, E19, E20, F13: an FP16 row, or an FP32 weight that something rounded to BF16 on the way, is not taken for granted.
        names_accepted = self.spec.contract(subject.contract).accepted(declared)
        accepted = [f"torch.{name}" for name in names_accepted]
        refuse(good[at].double(), TypeError, *accepted)
        for name, dtype in DTYPES.items():
            if name not in names_accepted:
                refuse(good[at].to(dtype), TypeError, f"torch.{name}", *accepted)
            elif len(self.spec.direction(backward).kin(declared.name)) > 1 and dtype != good[at].dtype:
                refuse(good[at].to(dtype), TypeError, "must agree")
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
        else:
            self._refused(subject, good, backward, TypeError, "out_dtype", out_dtype=torch.int32)
        for scalar in self.spec.scalars:
            # E5
            for value in (float("nan"), float("inf"), -1.0, 0.0, scalar.minimum / 2):
                self._refused(
                    subject, good, backward, ValueError, scalar.name, f"{scalar.minimum:g}", **{scalar.name: value}
                )
            for no_number in ("1", None):
                self._refused(subject, good, backward, TypeError, scalar.name, **{scalar.name: no_number})
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
                for name, golden in subject.golden_forward(batch, scalars).items():
                    _, excess = judge(got[name], golden, subject.tolerance(name, got[name].dtype, False))
                    assert excess is None, f"{name} with {scalar.name} = {value}: {excess}"
