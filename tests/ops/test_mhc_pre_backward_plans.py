"""Launch plans of the backward that mhc_pre, mhc_pre_norm and hyper_head share, on any machine; and what its code may not do."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest

from samebits import registry
from samebits.audit import judge
from samebits.audit.build import Build
from samebits.audit.compile import ARCHES, compile_build, read
from samebits.audit.limits import STRICT
from samebits.dispatch import Call
from samebits.ops.mhc_pre.cuda_backward import BackwardPlan, plans_backward
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import dense_layout

OPS = ("mhc_pre", "hyper_head")
CONTRACTS = ("ascending", "ascending-dsv4", "fast", "fast-dsv4")
GRADIENTS = ("grad_residual", "grad_weight", "grad_gain", "grad_bias")
SUBSETS = [chosen for count in range(1, 5) for chosen in combinations(GRADIENTS, count)]
WIDTHS = (1, 8, 17, 128, 4096, 7168, 7169, 2**22)
ROWS = (1, 7, 8, 9, 128, 4096, 32768, 2**31 - 1)
SMALL = dataclasses.replace(H200, name="a small GPU", arch=89, multiprocessors=20, shared_bytes=99 * 1024)


def call_of(
    op: str = "mhc_pre",
    contract: str = "ascending",
    rows: int = 4096,
    width: int = 4096,
    wanted: tuple[str, ...] = GRADIENTS,
    absent: tuple[str, ...] = (),
    misaligned: str = "",
    grad_hidden: str = "bfloat16",
    device: object = H200,
) -> Call:
    spec = registry.spec(op)
    sizes = spec.complete({"D": width})
    layouts = []
    for arg in spec.backward.inputs:
        if arg.name not in absent:
            dtype = grad_hidden if arg.name == "grad_hidden" else arg.dtypes[0]
            layouts.append((arg.name, dense_layout(arg, dtype, sizes, arg.name != misaligned)))
    return Call(
        op,
        True,
        contract,
        rows,
        tuple(sizes.items()),
        tuple(layouts),
        wanted,
        "bfloat16",
        device,  # type: ignore[arg-type]
    )


def entries(plan: BackwardPlan) -> list[str]:
    return [step.kernel.entry for step in plan]


def defines(step: Launch | None) -> dict[str, int]:
    assert step is not None
    return dict(step.kernel.defines)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_launch_is_within_the_limits(op: str, contract: str) -> None:
    for device in (H200,) if contract.startswith("fast") else (H200, SMALL):  # fast is kept on sm_90 alone
        for width in WIDTHS:
            for rows in ROWS:
                call = call_of(op, contract, rows, width, device=device)
                plans = plans_backward(call)
                assert plans and plans == plans_backward(call)
                for step in (step for plan in plans for step in plan):
                    grid = step.grid if isinstance(step.grid, tuple) else (step.grid, 1)
                    assert 1 <= grid[0] <= 2**31 - 1 and 1 <= grid[1] <= 65535, (step, rows, width)
                    assert 32 <= step.block <= 1024 and step.block % 32 == 0, step
                    assert step.shared <= device.shared_bytes - 1024, step


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wanted", SUBSETS, ids="+".join)
def test_nothing_runs_that_is_not_wanted(op: str, wanted: tuple[str, ...]) -> None:
    """A frozen mixer asks for grad_residual alone: no grad_weight, no chains."""
    for plan in plans_backward(call_of(op, wanted=wanted)):
        merged, sums = "grad_residual" in wanted, {"grad_gain", "grad_bias"} & {*wanted}
        assert entries(plan)[:2] == ["backward_ascending", "backward_controller"]
        assert (plan.merge is not None) == merged
        assert (plan.weight is not None) == ("grad_weight" in wanted)
        assert (plan.tokens is not None) == (bool(sums) and not merged)
        if merged:
            assert (
                plan.merge is not None
                and plan.merge.arguments[2] == len(sums) * registry.spec(op).complete({"D": 1})["N"]
            )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wanted", [s for s in SUBSETS if {*s} & {"grad_gain", "grad_bias"}], ids="+".join)
@pytest.mark.parametrize("width", (8, 4096, 7168))
def test_each_wanted_chain_is_folded_once(op: str, wanted: tuple[str, ...], width: int) -> None:
    outputs = registry.spec(op).complete({"D": 1})["N"]
    expected = [n for n in range(outputs) if "grad_gain" in wanted]
    expected += [outputs + n for n in range(outputs) if "grad_bias" in wanted]
    for plan in plans_backward(call_of(op, width=width, wanted=wanted)):
        if plan.merge is None:
            assert plan.tokens is not None and isinstance(plan.tokens.grid, int)
            (first,) = plan.tokens.arguments
            folded = [first + block for block in range(plan.tokens.grid)]
        else:  # a chain per warp in the first rows of the grid, which are no more than it takes
            assert isinstance(plan.merge.grid, tuple)
            chain_blocks, first, count = plan.merge.arguments
            warps = chain_blocks * plan.merge.grid[0] * plan.merge.block // 32
            assert warps >= count > warps - plan.merge.grid[0] * plan.merge.block // 32
            folded = [first + warp for warp in range(warps) if warp < count]
        assert folded == expected


@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("width", (1, 128, 129, 4096, 7168))
def test_the_merge_takes_every_token_and_column_once(width: int, device: object) -> None:
    for rows in (1, 7, 8, 9, 17, 1000, 4096):
        shares = set()
        for plan in plans_backward(call_of(rows=rows, width=width, device=device)):
            assert plan.merge is not None and isinstance(plan.merge.grid, tuple)
            tiles, blocks = plan.merge.grid
            share = blocks - plan.merge.arguments[0]
            shares.add(share)
            assert (tiles - 1) * 128 < width <= tiles * 128
            taken = []
            for y in range(share):  # as in the kernel: groups of eight, from the last one down
                top = ((rows - 1) // 8 - y) * 8
                assert top >= 0  # no block without work
                taken += [
                    token for token0 in range(top, -1, -8 * share) for token in range(token0, min(rows, token0 + 8))
                ]
            assert sorted(taken) == list(range(rows))
        assert len(shares) > 1 or device is SMALL or rows <= 8  # so that verification can compare launch shapes


def test_the_best_merge_fills_an_h200_once() -> None:
    for width, filled in ((4096, 384), (7168, 392), (128, 396)):
        plan = plans_backward(call_of(rows=8192, width=width))[0]
        assert plan.merge is not None and isinstance(plan.merge.grid, tuple)
        tiles, blocks = plan.merge.grid
        assert tiles * (blocks - plan.merge.arguments[0]) == filled


@pytest.mark.parametrize(
    ("contract", "width", "rms", "order"),
    [
        ("ascending", 4096, 1, "backward_ascending"),
        ("ascending", 7168, 1, "backward_ascending"),
        ("ascending-dsv4", 4096, 2, "backward_ascending"),
        ("ascending-dsv4", 7168, 1, "backward_ascending"),
        ("fast", 4096, 0, "backward_tree256"),
        ("fast-dsv4", 7168, 0, "backward_tree256"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_the_contract_alone_picks_the_arithmetic(op: str, contract: str, width: int, rms: int, order: str) -> None:
    """A product stands in for a division only by a power of two; no launch shape changes which arithmetic runs."""
    for rows in (1, 129, 10**6):
        for plan in plans_backward(call_of(op, contract, rows, width)):
            assert defines(plan.merge)["RMS"] == rms
            assert entries(plan)[0] == order
            assert plan.fold_call.contract == order.removeprefix("backward_")


@pytest.mark.parametrize("op", OPS)
def test_one_misaligned_input_is_enough(op: str) -> None:
    """Each kernel looks at what it reads by vectors itself; gain, r and q are read one by one."""
    read = {
        "fold": ("grad_hidden", "residual"),
        "merge": ("grad_hidden", "residual", "grad_streams", "weight"),
        "controller": ("grad_post", "grad_comb", "logits", "proj", "pre", "comb"),
    }
    known = [arg.name for arg in registry.spec(op).backward.inputs]
    for plan in plans_backward(call_of(op, width=3584)):
        assert all(defines(step)["VEC"] == 8 for step in (plan.fold[0], plan.merge, plan.controller))
    for plan in plans_backward(call_of(op, width=3585)):
        assert all(defines(step)["VEC"] == 1 for step in (plan.fold[0], plan.merge))
    for kernel, names in read.items():
        for name in (name for name in names if name in known):
            for plan in plans_backward(call_of(op, width=3584, misaligned=name)):
                steps = {"fold": plan.fold[0], "merge": plan.merge, "controller": plan.controller}
                assert {k for k, step in steps.items() if defines(step)["VEC"] == 1} == {
                    k for k, reads in read.items() if name in reads
                }, (kernel, name)


def test_what_is_compiled_follows_the_dtypes_and_the_legs() -> None:
    for dtype in ("bfloat16", "float32"):
        for absent in ((), ("grad_streams",)):
            for plan in plans_backward(call_of(grad_hidden=dtype, absent=absent)):
                assert defines(plan.merge)["G_BF16"] == defines(plan.fold[0])["G_BF16"] == int(dtype == "bfloat16")
                assert defines(plan.merge)["STREAMS"] == defines(plan.controller)["STREAMS"] == int(not absent)
                assert defines(plan.merge)["OUT_BF16"] == 1


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rms", (1, 2))
def test_an_ascending_merge_fuses_nothing(rms: int, arch: str) -> None:
    """Its contracts allow fused multiply-adds inside divisions and exp; here there is no exp, so the strictest rules hold."""
    choices = {"G_BF16": 1, "OUTPUTS": 24, "OUT_BF16": 1, "RMS": rms, "STREAMS": 1, "VEC": 8}
    kernel = CudaKernel("mhc_pre", "backward_merge", tuple(sorted(choices.items())))
    code = read(compile_build(Build(kernel, ("ascending",)), arch))
    assert judge.judge(code.ptx, code.sass, STRICT) == ()
