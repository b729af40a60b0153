"""The policy, and what a call decides, apart from any operator in particular."""

from __future__ import annotations

import threading

import pytest
import torch

import samebits
from samebits import dispatch, registry
from samebits.runtime import launch


def strided_residual() -> torch.Tensor:
    return torch.ones(2, 4, 16).bfloat16()[..., ::2]


def test_strict_refuses_a_copy_and_leaves_the_inputs_alone() -> None:
    pre, residual = torch.rand(2, 4), strided_residual()
    before = residual.clone()
    with (
        samebits.policy("strict"),
        pytest.raises(samebits.UnsupportedError, match=r"residual \(last axis has stride 2\)"),
    ):
        samebits.h_aggregate(pre, residual)
    assert torch.equal(before, residual)
    assert torch.equal(samebits.h_aggregate(pre, residual), samebits.h_aggregate(pre, residual.contiguous()))


def test_the_policy_reaches_other_threads() -> None:
    """torch runs the backward of CUDA tensors on threads of its own, where a context variable would have its default."""
    seen: list[object] = []

    def call() -> None:
        try:
            samebits.h_aggregate(torch.rand(2, 4), strided_residual())
        except samebits.UnsupportedError as error:
            seen.append(error)
        seen.append(dispatch.forced_plan())

    with samebits.policy("strict"), samebits.force_plan(2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert isinstance(seen[0], samebits.UnsupportedError)
    assert seen[1] == 2
    assert dispatch.strictness() == "warn"
    assert dispatch.forced_plan() == 0


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'warn', 'strict' or 'silent'"), samebits.policy("loud"):  # type: ignore[arg-type]
        pass


def test_decisions_are_kept_per_metadata_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.operator("h_aggregate")
    monkeypatch.setattr("samebits.operator.KNOWN_CALLS", 3)
    monkeypatch.setattr(op, "_decisions", {})
    for rows in (1, 2, 3, 4, 2):
        expected = samebits.h_aggregate(torch.ones(rows, 4), torch.ones(rows, 4, 8).bfloat16())
        assert expected.shape == (rows, 8)
        assert 1 <= len(op._decisions) <= 3


def test_the_architecture_has_its_compiler_name() -> None:
    assert [launch.arch_name(arch) for arch in (80, 90, 100)] == ["sm_80", "sm_90a", "sm_100"]
