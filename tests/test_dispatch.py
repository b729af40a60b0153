"""The policy, and what a call decides, apart from any operator in particular."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch

import samebits
from samebits import dispatch, registry
from samebits.runtime import device, launch, nvrtc


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


def test_policies_of_two_threads_may_end_in_any_order() -> None:
    first, second = samebits.policy("strict"), samebits.policy("silent")
    first.__enter__()
    second.__enter__()
    assert dispatch.strictness() == "silent"
    first.__exit__(None, None, None)
    assert dispatch.strictness() == "silent"
    second.__exit__(None, None, None)
    assert dispatch.strictness() == "warn"


def test_a_policy_inside_a_compiled_function_is_refused() -> None:
    """It would be traced away, and the call would run under whatever holds outside."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        with samebits.policy("strict"):
            return samebits.rmsnorm_residual(x, torch.ones(8))[0]

    with pytest.raises(Exception, match="around the compiled call"):
        torch.compile(inside, backend="eager", fullgraph=True)(torch.rand(3, 16).bfloat16()[:, ::2])


def test_a_copy_is_announced_once_at_the_line_of_the_caller() -> None:
    registry.operator("h_aggregate")._told.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (2, 3, 4):
            samebits.h_aggregate(torch.rand(2, 4), torch.ones(2, 4, 8 * step).bfloat16()[..., ::step])
    assert [(warning.filename, "copied" in str(warning.message)) for warning in caught] == [(__file__, True)]


def test_explain_copies_nothing() -> None:
    residual = strided_residual()
    ready = samebits.explain("h_aggregate", torch.rand(2, 4), residual)
    assert ready.copies == ("residual (last axis has stride 2)",)
    assert ready.tensors[1] is residual
    assert ready.inputs["residual"].is_contiguous()


def test_first_use_from_many_threads() -> None:
    code = """
import threading, torch, samebits
failures = []
def use():
    try:
        samebits.h_aggregate(torch.rand(2, 4), torch.rand(2, 4, 8).bfloat16())
    except Exception as error:
        failures.append(repr(error))
threads = [threading.Thread(target=use) for _ in range(12)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failures, failures
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("variable", ["NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS"])
def test_options_from_the_environment_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "--use_fast_math")
    with pytest.raises(nvrtc.CompileError, match=variable):
        nvrtc.compile_kernel(nvrtc.CudaKernel("h_aggregate", "forward", (("VEC", 8),)), "sm_90a")


@pytest.mark.parametrize("variable", ["TRITON_INTERPRET", "PTXAS_OPTIONS"])
def test_triton_is_not_used_where_its_bits_are_not_proven(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    why = device.missing.__wrapped__("triton")
    assert why is not None
    assert variable in why
