"""Every Triton kernel, compiled without a GPU: what its PTX must contain. What it may not contain is the audit's business."""

from __future__ import annotations

import collections
import functools
import importlib
import re
from typing import Any

import pytest

pytest.importorskip("triton")

from samebits import registry
from samebits.audit.build import Build
from samebits.runtime import triton_build, triton_launch

OPERATORS = [name for name in registry.names() if any(b.name == "triton" for b in registry.spec(name).backends)]


def builds(operator: str) -> tuple[Build, ...]:
    made: tuple[Build, ...] = importlib.import_module(f"samebits.ops.{operator}.triton").builds()
    return made


@functools.cache
def opcodes(kernel: Any, arch: int) -> collections.Counter[str]:
    """PTX instructions by full name, predicates stripped."""
    ptx = triton_build.compile_kernel(kernel, arch)["ptx"]
    return collections.Counter(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s", ptx, re.MULTILINE))


@pytest.mark.parametrize("operator", OPERATORS)
def test_labels_are_unique_and_contracts_known(operator: str) -> None:
    spec = registry.operator(operator).spec
    known = {contract.name for contract in spec.contracts if spec.keeps("triton", contract.name)}
    made = builds(operator)
    assert len({(build.owner, build.label) for build in made}) == len(made)
    assert {name for build in made for name in build.contracts} == known


def test_rsqrt_appears_where_a_forward_pass_needs_it_and_nowhere_else() -> None:
    for operator in OPERATORS:
        for build in builds(operator):
            dsv4 = build.kernel.name.startswith("_forward") and "DSV4=1" in build.kernel.name
            needed = dsv4 or build.kernel.name.startswith(("_rstd_ascending", "_forward_tree512"))
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
            if not dict(build.kernel.constexprs)["ALIGNED"] or "OUTPUTS" in dict(build.kernel.constexprs):
                continue  # there a row is shared out over many chains, so a lane has less than sixteen bytes of it
            found = opcodes(build.kernel, 90)
            assert not found["ld.global.b16"] and not found["st.global.b16"], build.label


def test_every_launch_and_every_build_forbids_fusion() -> None:
    assert triton_build.OPTIONS == {"enable_fp_fusion": False}
    assert triton_launch.OPTIONS is triton_build.OPTIONS
