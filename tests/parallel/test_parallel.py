"""Tokens, hidden columns and controllers over ranks: the bytes of one process, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from parallel import work
from parallel.ranks import on_ranks

from samebits import parallel
from samebits.dispatch import UnsupportedError
from samebits.nn import GradientChain


def _compare(whole: dict[str, dict[str, Any]], found: list[dict[str, Any]]) -> None:
    cases = [key for key in found[0] if "/" in key]
    assert cases
    for case in cases:
        expected = whole[case.split("/")[0]]
        for name, value in expected.items():
            if isinstance(value, list):
                rows: dict[int, str] = {}
                for rank in found:
                    rows |= rank[case].get(name, {})
                assert [rows[t] for t in range(len(value))] == value, f"{case}: {name}"
            else:
                assert [rank[case][name] for rank in found] == [value] * len(found), f"{case}: {name}"


@pytest.mark.parametrize("world", [2, 4])
def test_the_bytes_of_one_process(world: int) -> None:
    ops = ("rmsnorm_residual", "mhc_pre", "fp32_gemm_rms")
    whole = {op: work.expected(op) for op in ops}
    found = on_ranks(world, work.cpu_ops)
    _compare(whole, found)
    for rank in found:
        assert rank["hidden"]["y"] == rank["hidden"]["expected y"]
        assert rank["hidden"]["grad"] == rank["hidden"]["expected grad"]
        assert rank["replicas"] == "replicas differ from rank 0: sign on ranks [1]"
        assert len(rank["refused"]) == 2 and all("the token order names ranks" in text for text in rank["refused"])


def test_fast_chains_are_carried_at_whole_steps() -> None:
    whole = {"fp32_gemm_rms": work.expected("fp32_gemm_rms", 264, "fast")}
    _compare(whole, [{"fp32_gemm_rms/fast": rank} for rank in on_ranks(2, work.fast)])


def test_modules_over_ranks_have_the_gradients_of_one_process() -> None:
    whole = work.boundary(range(work.ROWS), GradientChain, torch.device("cpu"))
    ranks = on_ranks(2, work.boundary_of_rank)
    assert {"fn", "base", "scale"} <= whole.keys()
    for name in whole.keys() - {"streams"}:
        assert [rank[name] for rank in ranks] == [whole[name]] * 2, name
    assert [row for rank in ranks for row in rank["streams"]] == whole["streams"]


def test_summing_the_ranks_own_folds_is_other_bits() -> None:
    """Why the accumulator is carried: what an all-reduce would give differs."""
    made = work.subject("rmsnorm_residual", work.ROWS, None, "reference", torch.device("cpu"))
    half = work.ROWS // 2
    parts = [made.op.backward(*work.inputs(made, first, first + half), wanted=(False, True))[1] for first in (0, half)]
    whole = made.op.backward(*work.inputs(made, 0, work.ROWS), wanted=(False, True))[1]
    assert parts[0] is not None and parts[1] is not None and whole is not None
    assert not torch.equal(parts[0] + parts[1], whole)
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize(
    ("op", "placement", "reason"),
    [
        ("mhc_pre", parallel.Placement(hidden="sharded"), "gather_hidden"),
        ("rmsnorm_residual", parallel.Placement(hidden="sharded"), "sums over D"),
        ("mhc_pre", parallel.Placement(controller="sharded"), "replicate it"),
        ("mhc_pre", parallel.Placement(tokens="strided"), "alternate between ranks"),
        ("mhc_pre", parallel.Placement(tokens="contiguous", parameter_gradients="summed"), "token_sharded_backward"),
        ("mhc_pre", parallel.Placement(parameter_gradients="summed"), "multiplies it"),
    ],
)
def test_placements_that_cannot_keep_the_bytes_are_refused(op: str, placement: parallel.Placement, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        parallel.require(op, placement)


@pytest.mark.parametrize("tokens", ["replicated", "contiguous", "zigzag"])
def test_placements_that_keep_the_bytes_are_accepted(tokens: Any) -> None:
    for op in ("mhc_pre", "mhc_post", "rmsnorm_residual", "h_aggregate"):
        parallel.require(op, parallel.Placement(tokens=tokens))
    parallel.require("mhc_post", parallel.Placement(tokens="strided"))  # all of it is local to a token


def test_token_orders() -> None:
    order = parallel.TokenOrder.zigzag(2, 3)
    assert [(c.rank, c.first, c.last) for c in order.chunks] == [(0, 0, 3), (1, 3, 6), (1, 6, 9), (0, 9, 12)]
    assert parallel.TokenOrder.from_positions([[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]).of(0) == order.of(0)
    with pytest.raises(UnsupportedError, match="partition the batch"):
        parallel.TokenOrder.from_positions([[0, 1], [1, 2]])
    with pytest.raises(UnsupportedError, match="partition the batch"):
        parallel.TokenOrder.from_positions([[0, 1], [3]])
    with pytest.raises(UnsupportedError, match="out of order"):
        parallel.TokenOrder.from_positions([[1, 0], [2]])
    with pytest.raises(UnsupportedError, match="cut at multiples of 256"):
        parallel.TokenOrder.contiguous([100, 412]).require_cuts(256, "fast")
    parallel.TokenOrder.contiguous([256, 17]).require_cuts(256, "fast")


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("contract", ["ascending"])
def test_the_bytes_of_one_process_over_nccl(contract: str) -> None:
    ops = ("rmsnorm_residual", "mhc_pre")
    whole = {op: work.expected(op, contract=contract, backend="cuda", where="cuda") for op in ops}
    found = on_ranks(2, partial(work.on_gpus, contract, "cuda"), backend="nccl")
    _compare(whole, found)
    for rank in found:
        assert rank["hidden"]["grad"] == rank["hidden"]["expected grad"]
