"""Launch plans of the CUDA kernels, on any machine: shared memory, chunks of long rows, and who may be read by vectors."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random
from typing import Any

import pytest

from samebits import registry
from samebits.dispatch import Call
from samebits.ops.rmsnorm_residual.cuda import plans as norm_plans
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.sweep import dense_layout

NOTHING_STATIC = ("gemm_wgmma",)
"""Kernels that have no shared memory but what a launch gives them; others may have a little of their own."""
SMALL = dataclasses.replace(H200, name="a GPU with 99 KB", arch=89, shared_bytes=99 * 1024)
ONE_CHUNK = {"forward_ascending": 115584, "backward_x_ascending": 57216}
"""The longest row that an H200 block holds at once."""
LONG = (40000, 57215, 57216, 57217, 57344, 57345, 115583, 115584, 115585, 131072, 2**24 - 1, 2**24)
ROWS = (1, 3, 4096, 2**31 - 1)
CASES = [
    (name, backward, contract.name)
    for name in registry.names()
    for backward in (False, True)
    for contract in registry.spec(name).contracts
]
HEADS = ("qk_norm_rope", "qk_rmsnorm", "rope_3axis")
"""Their rows are at most 256 columns; tests/ops/test_qk_norm_rope.py says which input counts."""
COMPOSED = ("mhc_pre", "mhc_pre_norm", "hyper_head", "timestep_mlp", "linear", "fp32_linear", *HEADS)
"""They launch kernels one behind the other; which input counts for which is said in tests/ops/test_mhc_pre_*_plans.py,
test_timestep_mlp.py, test_linear.py and test_fp32_linear.py."""
NOT_READ = {
    "backward": ("table",),
    "backward_gamma": ("grad_residual", "gamma", "rstd"),
    "backward_residual": ("residual",),
    "fast_sums": ("weight",),
    "grad_x": ("grad_proj",),
    "grad_weight_ascending": ("grad_proj", "weight"),
    "fast_grad_weight": ("grad_proj", "weight"),
    "table_fma": ("temb", "bias"),
    "table_kchain": ("temb", "bias"),
    "grad_act": ("grad_table", "temb"),
    "grad_weight_few": ("grad_table", "temb", "weight"),
    "grad_weight_many": ("grad_table", "temb", "weight"),
}
"""Inputs that one of the kernels leaves alone, or reads number by number."""


def call_of(
    name: str,
    backward: bool,
    contract: str,
    rows: int,
    width: int | dict[str, int],
    device: Any = H200,
    misaligned: str = "",
) -> Call:
    """Every free axis has size ``width``, or its own, as far as its limits allow."""
    spec = registry.spec(name)
    direction = spec.direction(backward)
    asked = width if isinstance(width, dict) else {axis: width for axis, _, _ in spec.size_limits}
    sizes = spec.complete({axis: min(max(asked[axis], least), most) for axis, least, most in spec.size_limits})
    layouts = tuple(
        (arg.name, dataclasses.replace(dense_layout(arg, arg.dtypes[0], sizes), aligned=arg.name != misaligned))
        for arg in direction.inputs
    )
    wanted = tuple(result.name for result in direction.results)
    return Call(name, backward, contract, rows, tuple(sizes.items()), layouts, wanted, "float32", device)


def steps(call: Call) -> list[Launch]:
    backend = importlib.import_module(f"samebits.ops.{call.op}.cuda")
    if getattr(backend, "refuses", lambda call: None)(call) is not None:
        return []
    plans = backend.plans(call)
    assert plans == backend.plans(call)
    return [step for plan in plans for step in plan]


def by_vectors(call: Call) -> list[Launch]:
    """The steps with a kernel that can read by vectors."""
    return [step for step in steps(call) if "VEC" in dict(step.kernel.defines)]


@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("backward", [False, True])
def test_long_rows_come_in_chunks_that_fit(backward: bool, device: Any) -> None:
    """B11: whatever the row, a block asks for no more shared memory than there is; what does not fit comes in chunks."""
    entry = "backward_x_ascending" if backward else "forward_ascending"
    per_column, per_row = (4, 32 + 2 * 260 * 4) if backward else (2, 16)
    for width in LONG:
        for rows in ROWS:
            found = [
                step
                for plan in norm_plans(call_of("rmsnorm_residual", backward, "ascending", rows, width, device))
                for step in plan
                if step.kernel.entry == entry
            ]
            assert found
            for step in found:
                block_rows, columns = step.arguments
                assert 0 < step.shared <= device.shared_bytes - 1024
                assert step.shared == block_rows * (columns * per_column + per_row)  # as the kernel lays it out
                assert columns > 0 and columns % 128 == 0
                assert columns - 128 < width if columns >= width else block_rows == 1
                assert 1 <= block_rows <= 32
                assert isinstance(step.grid, int) and step.grid * block_rows >= rows
                assert (step.grid - 1) * block_rows < rows
                if device is H200:
                    assert (columns >= width) == (width <= ONE_CHUNK[entry])
                    assert columns >= width or columns == ONE_CHUNK[entry]


@pytest.mark.parametrize(("name", "backward", "contract"), CASES)
def test_every_launch_is_within_the_limits(name: str, backward: bool, contract: str) -> None:
    """B9, B11, B13: any number of rows and columns, also those that are declared but fit no memory."""
    for width in (1, 17, 128, 3584, 4096, 4097, *LONG):
        for rows in (*ROWS, 65535, 65536, 65537):
            for device in (H200, SMALL):
                for step in steps(call_of(name, backward, contract, rows, width, device)):
                    grid = step.grid if isinstance(step.grid, tuple) else (step.grid, 1)
                    assert 1 <= grid[0] <= 2**31 - 1 and 1 <= grid[1] <= 65535, (step, rows, width)
                    assert 32 <= step.block <= 1024 and step.block % 32 == 0, step
                    static = 0 if step.kernel.entry in NOTHING_STATIC else 1024
                    assert step.shared + static <= device.shared_bytes, step


@pytest.mark.parametrize(("name", "backward", "contract"), [case for case in CASES if case[0] not in COMPOSED])
def test_one_misaligned_input_is_enough(name: str, backward: bool, contract: str) -> None:
    """D1, D4: every pointer is looked at, that of a shared weight too. D3: D = 3584 is read by vectors, 3585 is not."""
    for step in by_vectors(call_of(name, backward, contract, 9, 3584)):
        assert dict(step.kernel.defines)["VEC"] == 8
    for step in by_vectors(call_of(name, backward, contract, 9, 3585)) if registry.spec(name).size_limits else ():
        assert dict(step.kernel.defines)["VEC"] == 1
    for arg in registry.spec(name).direction(backward).inputs:
        # Not by vectors: a single number per row, integers, the start of a fold.
        if arg.axes and not arg.integer and not arg.name.startswith("start_"):
            for step in by_vectors(call_of(name, backward, contract, 9, 3584, misaligned=arg.name)):
                if arg.name not in NOT_READ.get(step.kernel.entry, ()):
                    assert dict(step.kernel.defines)["VEC"] == 1, (arg.name, step)


@pytest.mark.parametrize("name", registry.names())
def test_rows_change_the_launch_and_never_the_contract(name: str) -> None:
    """H1, H3, H12, B13: which kernels run, and what they are compiled for, may depend on T only in ways that keep the order."""
    orders = {"ascending", "tree256", "tree512"}
    for contract in registry.spec(name).contracts:
        for backward in (False, True):
            seen = {
                frozenset(order for order in orders for step in steps(call) if order in step.kernel.entry)
                for call in (call_of(name, backward, contract.name, rows, 4096) for rows in (1, 128, 129, 257, 10**6))
            }
            own = {order for order in orders if contract.name.startswith(order)}
            assert len(seen) == 1 and (not own or next(iter(seen)) <= own)


@pytest.mark.parametrize("name", registry.names())
def test_the_audit_knows_every_kernel_that_a_call_reaches(name: str) -> None:
    """The list of builds comes from some sizes; calls of other sizes must not reach kernels that nobody audited."""
    spec, backend = registry.spec(name), registry.operator(name).backend("cuda")
    listed = {build.kernel for build in backend.builds()}
    chosen = random.Random(name)
    for _ in range(40):
        width = {axis: int(2 ** chosen.uniform(0, 17)) for axis, _, _ in spec.size_limits}
        rows = int(2 ** chosen.uniform(0, 17))
        for backward, contract in itertools.product((False, True), spec.contracts):
            for step in steps(call_of(name, backward, contract.name, rows, width)):
                assert step.kernel in listed, (step.kernel.name, width, rows)
