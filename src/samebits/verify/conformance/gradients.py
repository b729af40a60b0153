"""The explicit backward and autograd (kind F of the hostile inputs)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import dispatch
from samebits.verify.conformance.base import Base, Target, assert_all_same, assert_same
from samebits.verify.subject import Batch, gradients, leaf


class Gradients(Base):
    # --- explicit backward ----------------------------------------------------------------------------------------

    def test_only_what_is_wanted(self, target: Target, contract: str) -> None:
        # F4, F6, for the explicit backward: every mask
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
            if arg.optional and not arg.derived:
                absent: list[Tensor | None] = [None if i == index else t for i, t in enumerate(tensors)]
                zeros = [torch.zeros_like(t) if i == index else t for i, t in enumerate(tensors)]
                assert_all_same(self.run(subject, zeros, True), self.run(subject, absent, True), f"without {arg.name}")

    def test_derived_inputs_may_be_absent(self, target: Target, contract: str, backward: bool) -> None:
        subject = self.subject(target, contract)
        args = self.spec.direction(backward).inputs
        for count in (0, 1, 9, 33):
            tensors = self.inputs(subject, subject.batch(range(count)), backward)
            absent = [None if arg.derived else t for arg, t in zip(args, tensors, strict=True)]
            given = self.run(subject, tensors, backward)
            assert_all_same(given, self.run(subject, absent, backward), f"{count} rows, nothing derived beforehand")

    # --- autograd (F) ---------------------------------------------------------------------------------------------

    def test_every_subset_of_leaves(self, target: Target, contract: str, subset: tuple[bool, ...]) -> None:
        # F3, F4, F12: every leaf that asks gets its gradient, in its own dtype, and the bits of the full run; no other does.
        subject = self.subject(target, contract)
        batch = subject.batch(range(9))
        full = self.differentiate(subject, self.leaves(subject, batch), batch)
        leaves = self.leaves(subject, batch)
        assert set(full) == set(self.spec.learned)
        for tensor in leaves.values():
            tensor.requires_grad_(False)
        for name, on in zip(self.spec.learned, subset, strict=True):
            leaves[name].requires_grad_(on)
        if not any(subset):
            results = self.run(subject, [leaves[a.name] for a in self.spec.forward.inputs], backward=False)
            assert not any(value.requires_grad for value in results.values())
            return
        got = self.differentiate(subject, leaves, batch)
        wanted = {name for name, on in zip(self.spec.learned, subset, strict=True) if on}
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
        known = batch.rows | batch.shared
        fixed = {n: v for n, v in known.items() if n not in self.spec.learned}
        roots = {n: leaf(known[n]) for n in self.spec.learned}
        mid = {n: torch.sigmoid(r) for n, r in roots.items()}
        inner = self.differentiate(subject, {n: leaf(m) for n, m in mid.items()} | fixed, batch)
        expected = dict(
            zip(
                roots,
                torch.autograd.grad([mid[n] for n in inner], list(roots.values()), list(inner.values())),
                strict=True,
            )
        )
        mid = {n: torch.sigmoid(r) for n, r in roots.items()} | fixed
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
            torch.autograd.grad(total, [leaves[name] for name in self.spec.learned], create_graph=True)
        tensors = [leaf(t) for t in self.inputs(subject, batch, True)]
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
            if any(t.requires_grad for t in leaves):
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
            shared = {n: t for n, t in leaves.items() if n in subject.batch([]).shared and n in self.spec.learned}
            for ids in (range(5), range(5, 12)):
                batch = subject.batch(ids)
                mixed = {n: leaf(v) for n, v in (batch.rows | batch.shared).items()} | shared
                results = self.run(subject, [mixed[a.name] for a in self.spec.forward.inputs], backward=False)
                names = [r.name for r in self.public()]
                torch.autograd.backward(
                    [results[n] for n in names], [batch.upstream[n].to(results[n].dtype) for n in names]
                )
            runs.append({n: t.grad for n, t in shared.items() if t.grad is not None})
        assert_all_same(runs[0], runs[1], "accumulated gradients")
