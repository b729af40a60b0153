"""Launch plans: pure, several per call, within the limits of a launch, for every shape that the contract accepts."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

pytest.importorskip("triton")

from samebits import registry
from samebits.dispatch import Call, Layout
from samebits.runtime.device import H200

READ_BY_VECTORS = {
    ("fp32_gemm_rms", "_forward"): ("x", "weight"),
    ("fp32_gemm_rms", "_grad_x"): ("x",),
    ("fp32_gemm_rms", "_grad_weight"): ("x",),
}
"""Where it is not every input."""
ROWS = (1, 2, 31, 32, 33, 528, 529, 4096, 65537, 10**6, 2**31 - 1)
WIDTHS = (1, 2, 7, 8, 17, 128, 4095, 4096, 4097, 7168, 2**20, 2**24)
GRID_0, GRID_1 = 2**31 - 1, 65535
COMPOSED = ("mhc_pre", "mhc_pre_norm", "hyper_head")
"""They ask several operators, and do nothing but that and sums over tokens: tests/ops/test_mhc_pre_triton.py."""
CASES = [
    (name, backward, contract.name)
    for name in registry.names()
    for backward in (False, True)
    for contract in registry.operator(name).spec.contracts
    if registry.operator(name).spec.keeps("triton", contract.name) and name not in COMPOSED
]


def call_of(name: str, backward: bool, contract: str, rows: int, width: int, aligned: bool = True) -> Call:
    """Every free axis has size ``width``, as far as its limits allow."""
    spec = registry.operator(name).spec
    direction = spec.direction(backward)
    sizes = spec.complete({axis: min(max(width, least), most) for axis, least, most in spec.size_limits})
    layouts = tuple((arg.name, Layout(arg.dtypes[0], (), aligned)) for arg in direction.inputs)
    wanted = tuple(result.name for result in direction.results)
    return Call(name, backward, contract, rows, tuple(sizes.items()), layouts, wanted, "float32", H200)


class Recorded:
    """Stands for torch tensors and for the launcher: what would be launched, and nothing else."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, ...], dict[str, Any], tuple[Any, ...]]] = []

    def launch(self, function: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constexprs: Any) -> None:
        assert list(function.arg_names[len(arguments) :]) == [n for n in function.arg_names if n in constexprs]
        self.launches.append((function.__name__, grid, {**constexprs, "num_warps": num_warps}, arguments))

    def stride(self, axis: int) -> int:
        return 0

    def new_empty(self, size: int) -> Recorded:
        return self


def launches(
    monkeypatch: pytest.MonkeyPatch, call: Call, plan: Any
) -> list[tuple[str, tuple[int, ...], dict[str, Any], Any]]:
    module = importlib.import_module(f"samebits.ops.{call.op}.triton")
    recorded = Recorded()
    monkeypatch.setattr(module, "launch", recorded.launch)
    inputs = {name: recorded for name, _ in call.layouts}
    module.run(call, plan, inputs, dict.fromkeys(call.wanted, recorded), {"eps": 1e-6})
    return recorded.launches


@pytest.mark.parametrize(("name", "backward", "contract"), CASES)
def test_every_plan_of_every_shape_can_be_launched(
    monkeypatch: pytest.MonkeyPatch, name: str, backward: bool, contract: str
) -> None:
    """B9: from one row to 2^31 - 1."""
    plans = importlib.import_module(f"samebits.ops.{name}.triton").plans
    for rows in ROWS:
        for width in WIDTHS:
            call = call_of(name, backward, contract, rows, width)
            options = plans(call)
            assert options == plans(call)
            assert len(set(options)) >= 2
            for plan in options:
                for function, grid, constants, _ in launches(monkeypatch, call, plan):
                    assert 1 <= grid[0] <= GRID_0 and all(1 <= size <= GRID_1 for size in grid[1:]), (function, grid)
                    sizes = [v for k, v in constants.items() if k in ("ROWS", "WIDTH", "LANES", "num_warps")]
                    assert all(size & (size - 1) == 0 and size > 0 for size in sizes), (function, constants)
                    lanes = constants["LANES"] * 8 if "LANES" in constants else constants.get("WIDTH", 256)
                    assert lanes * constants["ROWS"] <= 2**17, "a tile has at most 2^17 elements"


@pytest.mark.parametrize(("name", "backward", "contract"), CASES)
def test_all_rows_and_columns_are_covered(
    monkeypatch: pytest.MonkeyPatch, name: str, backward: bool, contract: str
) -> None:
    module = importlib.import_module(f"samebits.ops.{name}.triton")
    for rows, width in ((1, 1), (33, 4097), (10**6, 128)):
        call = call_of(name, backward, contract, rows, width)
        for plan in module.plans(call):
            for function, grid, constants, _ in launches(monkeypatch, call, plan):
                if grid == (getattr(module, "PROGRAMS", None),):
                    continue  # each program takes tile after tile, until there are none
                if function in ("_grad_gamma", "_grad_weight"):
                    assert grid[0] * constants["WIDTH"] >= width
                    continue
                assert grid[0] * constants["ROWS"] >= rows
                if len(grid) == 2:
                    assert grid[1] * constants["WIDTH"] >= width


def test_lanes_are_all_512_where_the_row_fills_them() -> None:
    plans = importlib.import_module("samebits.ops.rmsnorm_residual.triton").plans
    for width in WIDTHS:
        for plan in plans(call_of("rmsnorm_residual", False, "tree512", 4, width)):
            lanes = plan.tree.width // 8
            assert lanes == 512 or lanes * 8 >= width


@pytest.mark.parametrize(
    ("width", "inputs", "expected"), [(4096, True, True), (4096, False, False), (4097, True, False)]
)
def test_wide_accesses_need_aligned_inputs_and_an_aligned_pitch(
    monkeypatch: pytest.MonkeyPatch, width: int, inputs: bool, expected: bool
) -> None:
    for name, backward, contract in CASES:
        if not registry.operator(name).spec.size_limits and inputs:
            continue  # no width to be odd
        call = call_of(name, backward, contract, 9, width, aligned=inputs)
        plan = importlib.import_module(f"samebits.ops.{name}.triton").plans(call)[0]
        assert all(constants["ALIGNED"] is expected for _, _, constants, _ in launches(monkeypatch, call, plan))


@pytest.mark.parametrize(("name", "backward", "contract"), CASES)
def test_one_misaligned_input_is_enough(
    monkeypatch: pytest.MonkeyPatch, name: str, backward: bool, contract: str
) -> None:
    """D1, D4: every pointer is looked at, that of a shared weight too."""
    call = call_of(name, backward, contract, 9, 4096)
    for index, (arg, layout) in enumerate(call.layouts):
        bent = (*call.layouts[:index], (arg, Layout(layout.dtype, (), False)), *call.layouts[index + 1 :])
        one = dataclasses.replace(call, layouts=bent)
        for plan in importlib.import_module(f"samebits.ops.{name}.triton").plans(one):
            for function, _, constants, _ in launches(monkeypatch, one, plan):
                if arg in READ_BY_VECTORS.get((name, function), (arg,)):
                    assert not constants["ALIGNED"], arg


@pytest.mark.parametrize(("name", "backward", "contract"), CASES)
def test_the_audit_sees_what_runs(monkeypatch: pytest.MonkeyPatch, name: str, backward: bool, contract: str) -> None:
    module = importlib.import_module(f"samebits.ops.{name}.triton")
    audited = {
        (b.kernel.function.__name__, b.kernel.num_warps, frozenset(p for p in b.kernel.constexprs if p[1] is not None))
        for b in module.builds()
        if contract in b.contracts
    }
    tuned = dict(registry.operator(name).spec.tuned).get("D", ())
    for rows in (1, 128, 10**6):
        for width in (*tuned, 4097):
            call = call_of(name, backward, contract, rows, width, aligned=width % 8 == 0)
            for function, _, constants, _ in launches(monkeypatch, call, module.plans(call)[0]):
                warps = constants.pop("num_warps")
                assert (function, warps, frozenset(constants.items())) in audited, (rows, width, function)


@pytest.mark.parametrize("rows", [1, 16, 2**31])
def test_triton_specialises_on_types_alone(rows: int) -> None:
    """G9: what Triton would compile for a call has the types of the audited build, and nothing else to depend on."""
    import torch
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import create_function_from_signature

    from samebits.ops.h_aggregate import triton as backend

    function = backend._backward_ascending
    bind = create_function_from_signature(function.signature, function.params, BaseBackend)
    bf16 = torch.empty(1, dtype=torch.bfloat16)
    constants = {"ROWS": 8, "WIDTH": 64, "STAGES": 3, "ALIGNED": True}
    arguments = (bf16, torch.empty(1), bf16, None, torch.empty(1), 2**40, 0, 1, 16, rows, 1)
    _, specialised, _ = bind(*arguments, **constants, num_warps=1)
    kinds = {"grad_hidden": "*bf16", "pre": "*fp32", "residual": "*bf16", "grad_pre": None, "grad_residual": "*fp32"}
    audited = backend.build(function, kinds, 1, **constants)
    assert [kind for kind, _ in specialised] == [kind for _, kind in audited.signature]
    assert all(extra is None for kind, extra in specialised if kind != "constexpr")
