"""The Triton backends of mhc_pre, mhc_pre_norm and hyper_head: what they hand from part to part, and their own kernel.

Here the parts are their references, which take the same calls, so the whole must have the bits of the operator's own
reference on any machine. The kernels are compared under the interpreter in tests/backends, that of these backends too, and on
a GPU the conformance tests run all of it.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from ops.controllers import assert_same, drawn, forward
from torch import Tensor

pytest.importorskip("triton")

from samebits import registry
from samebits.checks import layout_of
from samebits.dispatch import Call
from samebits.exact import fold
from samebits.runtime.device import H200
from samebits.runtime.sweep import dense_layout

OPS = ("mhc_pre", "mhc_pre_norm", "hyper_head")
CONTRACTS = ("ascending", "ascending-dsv4")


def token_sums(function: Any, grid: tuple[int, ...], *arguments: Any, **constexprs: Any) -> None:
    """Stands for the launcher: the one kernel of these backends, in PyTorch."""
    grad_logits, proj, r, start_gain, start_bias, grad_gain, grad_bias, proj_row, r_row, T, N = arguments
    assert function.__name__ == "_token_sums" and grid == (1,) and grad_logits.shape == (T, N)
    assert (proj_row, r_row) == (proj.stride(0), r.stride(0))
    assert constexprs["WIDTH"] >= N
    if grad_gain is not None:
        grad_gain.copy_(fold.left_fold(grad_logits * (r[:, None] * proj), 0, start_gain))
    if grad_bias is not None:
        grad_bias.copy_(fold.left_fold(grad_logits, 0, start_bias))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.ops.mhc_pre import triton as mhc_pre
    from samebits.ops.mhc_pre_norm import triton as mhc_pre_norm

    for name in mhc_pre.PARTS:
        monkeypatch.setitem(mhc_pre.PARTS, name, importlib.import_module(f"samebits.ops.{name}.reference"))
    monkeypatch.setattr(mhc_pre, "launch", token_sums)
    monkeypatch.setattr(mhc_pre_norm, "NORM", importlib.import_module("samebits.ops.rmsnorm_residual.reference"))


def run(
    op: str, backward: bool, contract: str, inputs: dict[str, Tensor], wanted: tuple[str, ...], grad_dtype: str
) -> dict[str, dict[str, Tensor]]:
    """The wanted results of the reference and of the Triton backend, which gets memory full of NaN."""
    spec = registry.spec(op)
    rows, width = inputs["residual"].shape[0], inputs["residual"].shape[-1]
    sizes = spec.complete({"D": width})
    layouts = tuple((name, layout_of(tensor)) for name, tensor in inputs.items())
    call = Call(op, backward, contract, rows, tuple(sizes.items()), layouts, wanted, grad_dtype, H200)
    found: dict[str, dict[str, Tensor]] = {}
    for backend in ("reference", "triton"):
        module = importlib.import_module(f"samebits.ops.{op}.{backend}")
        results = {}
        for declared in spec.direction(backward).results:
            if declared.name in wanted:
                shape = [rows] * declared.rows + [sizes[axis] for axis in declared.axes]
                kind = grad_dtype if declared.dtype == "grad" else declared.dtype
                results[declared.name] = torch.full(shape, float("nan"), dtype=getattr(torch, kind))
        module.run(call, module.plans(call)[0], inputs, results, {"eps": 1e-5, "norm_eps": 1e-3})
        found[backend] = results
    return found


def assert_backends_agree(found: dict[str, dict[str, Tensor]], what: str) -> None:
    for name, value in found["reference"].items():
        assert_same(value, found["triton"][name], f"{name}, {what}")


def apart(residual: Tensor) -> Tensor:
    """Streams that do not lie one behind the other."""
    wide = torch.full((residual.shape[0], 4, residual.shape[-1] + 8), float("nan"), dtype=residual.dtype)
    wide[..., : residual.shape[-1]] = residual
    return wide[..., : residual.shape[-1]]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_what_is_handed_from_part_to_part(op: str, contract: str) -> None:
    spec = registry.spec(op)
    for rows, width, arrange in ((3, 16, apart), (1, 5, torch.clone)):
        given = drawn(op, rows, width)
        given["residual"] = arrange(given["residual"])
        entering = {arg.name: given[arg.name] for arg in spec.forward.inputs}
        everything = tuple(result.name for result in spec.forward.results)
        found = run(op, False, contract, entering, everything, "float32")
        assert_backends_agree(found, "forward")
        known = given | forward(op, given, contract)
        names = tuple(result.name for result in spec.backward.results)
        optional = tuple(arg.name for arg in spec.backward.inputs if arg.optional)
        subsets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names) + 1))
        for wanted in subsets:
            for absent, grad_dtype in (((), "bfloat16"), (optional, "float32")):
                inputs = {arg.name: known[arg.name] for arg in spec.backward.inputs if arg.name not in absent}
                got = run(op, True, contract, inputs, wanted, grad_dtype)
                assert_backends_agree(got, f"{wanted} without {absent}")


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("op", OPS)
def test_a_wrong_part_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a part that adds its sums in another order, and legs that are left out."""
    from samebits.ops.mhc_pre import triton as mhc_pre

    given = drawn(op, 3, 40)
    spec = registry.spec(op)
    known = given | forward(op, given, "ascending")
    inputs = {arg.name: known[arg.name] for arg in spec.backward.inputs}
    wanted = ("grad_residual", "grad_weight")
    right = mhc_pre.PARTS["fp32_gemm_rms"].run

    def without_grad_r(call: Call, plan: None, tensors: dict[str, Tensor], *rest: Any) -> None:
        right(call, plan, tensors | {"grad_r": torch.zeros_like(tensors["grad_r"])}, *rest)

    monkeypatch.setattr(mhc_pre.PARTS["fp32_gemm_rms"], "run", without_grad_r)
    found = run(op, True, "ascending", inputs, wanted, "float32")
    with pytest.raises(AssertionError, match="grad_residual"):
        assert_backends_agree(found, "without grad_r")


def test_the_parts_are_asked_for_what_their_contracts_accept() -> None:
    """Each call of a part names the inputs and results of its declaration, and a layout for every tensor it gets."""
    for op, contract, backward in itertools.product(OPS, CONTRACTS, (False, True)):
        spec = registry.spec(op)
        sizes = spec.complete({"D": 4096})
        layouts = tuple((a.name, dense_layout(a, a.dtypes[0], sizes)) for a in spec.direction(backward).inputs)
        wanted = tuple(r.name for r in spec.direction(backward).results)
        call = Call(op, backward, contract, 9, tuple(sizes.items()), layouts, wanted, "float32", H200)
        module = importlib.import_module(f"samebits.ops.{op}.triton")
        plan = module.plans(call)[0]
        asked = [part for _, part, _ in (plan.mix if op == "mhc_pre_norm" else plan).parts]
        asked += [plan.norm_call] if op == "mhc_pre_norm" else []
        for part in asked:
            declared = registry.spec(part.op).direction(part.backward)
            assert part.contract in [c.name for c in registry.spec(part.op).contracts]
            assert dict(part.sizes) == registry.spec(part.op).complete(dict(part.sizes))
            assert set(part.wanted) <= {r.name for r in declared.results}
            for name, layout in part.layouts:
                arg = declared.input(name)
                assert layout.dtype in arg.dtypes and len(layout.strides) == len(arg.axes) + arg.rows, (part.op, name)
                assert layout.aligned, (part.op, name)


def test_labels_and_contracts_of_the_builds() -> None:
    for op in OPS:
        made = importlib.import_module(f"samebits.ops.{op}.triton").builds()
        assert {name for build in made for name in build.contracts} == set(CONTRACTS)
        assert len({(build.owner, build.label) for build in made}) == len(made)
