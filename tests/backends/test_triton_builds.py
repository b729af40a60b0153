"""Every Triton kernel, compiled for three architectures without a GPU: what its PTX may and must not contain."""

from __future__ import annotations

import collections
import functools
import importlib
import re
from typing import Any

import pytest

pytest.importorskip("triton")

from samebits.audit.build import Build
from samebits.runtime import triton_build, triton_launch

OPERATORS = ("h_aggregate", "rmsnorm_residual")
ARCHES = (80, 90, 100)
ROUNDED = re.compile(r"(add|sub|mul|div)\.rn\.f32(x2)?")


def builds(operator: str) -> tuple[Build, ...]:
    made: tuple[Build, ...] = importlib.import_module(f"samebits.ops.{operator}.triton").builds()
    return made


CASES = [
    pytest.param(build, arch, id=f"{build.label}-sm{arch}")
    for operator in OPERATORS
    for build in builds(operator)
    for arch in ARCHES
]


@functools.cache
def opcodes(kernel: Any, arch: int) -> collections.Counter[str]:
    """PTX instructions by full name, predicates stripped."""
    ptx = triton_build.compile_kernel(kernel, arch)["ptx"]
    return collections.Counter(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s", ptx, re.MULTILINE))


@pytest.mark.parametrize(("build", "arch"), CASES)
def test_arithmetic_is_what_the_contract_says(build: Build, arch: int) -> None:
    found = opcodes(build.kernel, arch)
    for name in found:
        assert ".ftz" not in name, name
        assert not name.startswith(("fma.", "mad.f", "atom", "red.")), name
        if re.match(r"(add|sub|mul|div|fma|mad)\..*f(16|32|64)", name):
            assert ROUNDED.fullmatch(name), f"{name}: rounding not stated, so ptxas may contract it"
        if ".approx" in name:
            assert name == "rsqrt.approx.f32"
    assert found, "the pattern found no instructions"


@pytest.mark.parametrize("operator", OPERATORS)
def test_labels_are_unique_and_contracts_known(operator: str) -> None:
    from samebits import registry

    known = {contract.name for contract in registry.operator(operator).spec.contracts}
    made = builds(operator)
    assert len({build.label for build in made}) == len(made)
    assert {name for build in made for name in build.contracts} == known


def test_rsqrt_appears_where_a_forward_pass_needs_it_and_nowhere_else() -> None:
    for operator in OPERATORS:
        for build in builds(operator):
            needed = build.kernel.name.startswith(("_rstd_ascending", "_forward_tree512"))
            assert (opcodes(build.kernel, 90)["rsqrt.approx.f32"] > 0) == needed, build.label


def test_the_absent_leg_is_added_as_a_zero() -> None:
    """-0 + 0 is +0: a compiler that dropped the addition would change bits."""
    for build in builds("rmsnorm_residual"):
        if build.kernel.name.startswith("_grad_x[") and "grad_residual=None" in build.kernel.name:
            found = opcodes(build.kernel, 90)
            assert found["add.rn.f32"] == found["sub.rn.f32"] > 0


def test_aligned_rows_are_read_sixteen_bytes_at_a_time() -> None:
    for operator in OPERATORS:
        for build in builds(operator):
            if not dict(build.kernel.constexprs)["ALIGNED"]:
                continue
            found = opcodes(build.kernel, 90)
            assert not found["ld.global.b16"] and not found["st.global.b16"], build.label


def test_fusion_is_off_because_it_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the same kernel with Triton's default contracts, and the rule above sees it."""
    build = next(b for b in builds("rmsnorm_residual") if b.kernel.name.startswith("_rstd_ascending"))
    monkeypatch.setattr(triton_build, "OPTIONS", {"enable_fp_fusion": True})
    found = opcodes.__wrapped__(build.kernel, 90)
    assert any(name.startswith("fma.") for name in found)
    assert triton_launch.OPTIONS == {"enable_fp_fusion": False}
