"""Launch plans of the forward that mhc_pre, mhc_pre_norm and hyper_head share, on any machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ops.controllers import CONTRACTS

from samebits import registry
from samebits.dispatch import Call
from samebits.ops.mhc_pre.cuda_forward import ForwardPlan, plans_forward
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.sweep import dense_layout

OPS = ("mhc_pre", "mhc_pre_norm", "hyper_head")
ROWS = (1, 128, 264, 265, 4096, 100_000, 2**31 - 1)
WIDTHS = (1, 8, 17, 1024, 1032, 2048, 4095, 4096, 4097, 7168, 7176, 8192, 8200, 2**22)
SMALL = dataclasses.replace(H200, name="a GPU with 99 KB", multiprocessors=20, shared_bytes=99 * 1024)


def call_of(
    op: str, contract: str, rows: int = 4096, width: int = 4096, misaligned: str = "", device: Any = H200
) -> Call:
    spec = registry.spec(op)
    sizes = spec.complete({"D": width})
    layouts = tuple(
        (arg.name, dense_layout(arg, arg.dtypes[0], sizes, arg.name != misaligned)) for arg in spec.forward.inputs
    )
    wanted = tuple(result.name for result in spec.forward.results)
    return Call(op, False, contract, rows, tuple(sizes.items()), layouts, wanted, "float32", device)


def defines(step: Launch) -> dict[str, int]:
    return dict(step.kernel.defines)


def every_plan(contract: str, **options: Any) -> list[tuple[str, ForwardPlan]]:
    return [(op, plan) for op in OPS for plan in plans_forward(call_of(op, contract, **options))]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("device", [H200, SMALL], ids=["h200", "small"])
def test_every_token_and_every_column_has_its_thread(contract: str, device: Any) -> None:
    for rows in ROWS:
        for width in WIDTHS:
            for op, plan in every_plan(contract, rows=rows, width=width, device=device):
                chosen = defines(plan.collapse)
                assert plan.collapse.grid == rows
                assert plan.collapse.block == chosen["LANES"] + 32 * chosen["FUSED"]
                assert chosen["FUSED"] == (plan.weights is None), "a token's weights are made once"
                assert chosen["HOLD"] == 0 or (chosen["HOLD"] * chosen["LANES"] * 8 >= width and chosen["VEC"] == 8)
                if plan.weights is not None:
                    assert isinstance(plan.weights.grid, int)
                    assert (plan.weights.grid - 1) * 32 < rows <= plan.weights.grid * 32, op


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_kernels_are_those_of_the_contract_however_many_rows(contract: str) -> None:
    fast, dsv4 = contract.startswith("fast"), contract.endswith("-dsv4")
    for rows in ROWS:
        plans = every_plan(contract, rows=rows)
        assert {plan.weights is None for _, plan in plans} == {True, False}, "either form is tried"
        for op, plan in plans:
            finish = plan.collapse if plan.weights is None else plan.weights
            form = {"HEAD": int(op == "hyper_head"), "IS_FAST": int(fast), "IS_DSV4": int(dsv4)}
            assert form.items() <= defines(finish).items()
            assert plan.sums.fast == fast and (plan.sums.parts == 1 or fast)
            inside = op == "mhc_pre_norm" and fast
            behind = op == "mhc_pre_norm" and not fast
            assert defines(plan.collapse)["NORM"] == inside
            assert [step.kernel.entry for step in plan.norm] == ["forward_ascending"] * behind
            assert all(defines(step)["WITHOUT_COPY"] == 1 for step in plan.norm)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_who_must_be_aligned(contract: str) -> None:
    """D1, D4: every pointer that a kernel reads by vectors is looked at, and no other one slows it down. D3: odd widths."""
    fast = contract.startswith("fast")
    for _, plan in every_plan(contract, width=3584):
        assert defines(plan.collapse)["VEC"] == 8 and all(defines(step)["VEC"] == 8 for step in plan.norm)
    for _, plan in every_plan(contract, width=3585):
        assert defines(plan.collapse)["VEC"] == 1 and all(defines(step)["VEC"] == 1 for step in plan.norm)
    for _, plan in every_plan(contract, misaligned="residual"):
        assert defines(plan.collapse)["VEC"] == 1
        assert all(defines(step)["VEC"] == 1 for step in plan.sums.launches if "X_BF16" in defines(step))
    for name in ("weight", "gain", "bias"):
        assert all(defines(plan.collapse)["VEC"] == 8 for _, plan in every_plan(contract, misaligned=name))
    for op, plan in every_plan(contract, misaligned="gamma"):
        assert defines(plan.collapse)["VEC"] == (1 if fast and op == "mhc_pre_norm" else 8)
        assert all(defines(step)["VEC"] == 1 for step in plan.norm)


def test_few_tokens_get_many_threads_and_many_tokens_small_blocks() -> None:
    few, many = (plans_forward(call_of("mhc_pre", "fast", rows=rows))[0] for rows in (1, 4096))
    assert few.collapse.block > many.collapse.block
    assert few.weights is None, "a token alone waits for its Sinkhorn rounds; its streams are read beside them"
