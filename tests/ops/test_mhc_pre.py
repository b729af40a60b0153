"""``mhc_pre``: everything an operator must do, and what is special to it."""

from __future__ import annotations

import pytest
import torch
from ops import controllers
from ops.controllers import CONTRACTS, Conformance, assert_same, backward, drawn, forward

import samebits
from samebits import registry
from samebits.exact.bits import digest

OP = "mhc_pre"


class TestMhcPre(Conformance):
    op = "mhc_pre"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_it_is_the_composition_of_the_single_operators(contract: str) -> None:
    given = drawn(OP, 6, 40)
    residual, weight, gain = given["residual"], given["weight"], given["gain"]
    over_d = "tree256" if contract.startswith("fast") else "ascending"
    projection = registry.operator("fp32_gemm_rms")
    x = residual.flatten(-2)

    found = forward(OP, given, contract)
    proj, r, q = projection.forward(x, weight, contract=contract)
    logits = ((r[:, None] * proj) * gain) + given["bias"]
    pre, post, comb = samebits.hc_split_sinkhorn(logits)
    hidden = samebits.h_aggregate(pre, residual, contract=over_d)
    expected = {
        "hidden": hidden,
        "post": post,
        "comb": comb,
        "pre": pre,
        "logits": logits,
        "proj": proj,
        "r": r,
        "q": q,
    }
    for name, value in expected.items():
        assert_same(value, found[name], name)

    for dtype in (torch.bfloat16, torch.float32):
        upstream = given["grad_hidden"].to(dtype)
        got = backward(OP, given | found | {"grad_hidden": upstream}, contract)
        grad_pre, collapse_leg = samebits.h_aggregate_backward(upstream, pre, residual, contract=over_d)
        grad_logits = samebits.hc_split_sinkhorn_backward(grad_pre, given["grad_post"], given["grad_comb"], logits)
        scaled = grad_logits * gain
        grad_r = torch.zeros(6)
        for n in range(24):
            grad_r = grad_r + scaled[:, n] * proj[:, n]
        grad_x, grad_weight = projection.backward(
            scaled * r[:, None], grad_r, x, weight, r, q, given["start_weight"], contract=contract
        )
        post_leg, *_ = samebits.mhc_post_backward(
            given["grad_streams"], residual, hidden, comb, post, wanted=(True, False, False, False)
        )
        grad_gain, grad_bias = given["start_gain"], given["start_bias"]
        for t in range(6):
            grad_gain = grad_gain + grad_logits[t] * (r[t] * proj[t])
            grad_bias = grad_bias + grad_logits[t]
        assert_same((collapse_leg + grad_x.view_as(residual)) + post_leg, got["grad_residual"], "grad_residual")
        for name, value in {"grad_weight": grad_weight, "grad_gain": grad_gain, "grad_bias": grad_bias}.items():
            assert_same(value, got[name], name)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_frozen_controller_keeps_every_leg_of_the_streams(contract: str) -> None:
    controllers.assert_frozen_controller(OP, contract)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_padding_row_adds_nothing_to_any_gradient(contract: str) -> None:
    controllers.assert_padding_adds_nothing(OP, contract)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_batches_continue_one_chain(contract: str) -> None:
    controllers.assert_batches_continue(OP, contract)


def test_the_leg_of_the_post_mix_goes_through_the_rows_of_comb() -> None:
    """comb[i, j] leads from stream i to stream j, and it is not symmetric: a transposed one would be seen."""
    given = drawn(OP, 4, 16)
    found = forward(OP, given, "ascending")
    comb = found["comb"]
    assert ((comb - comb.transpose(-1, -2)).abs().amax((-1, -2)) > 0.01).all()
    zeros = {name: torch.zeros_like(given[name]) for name in ("grad_hidden", "grad_post", "grad_comb")}
    for j in range(4):
        streams = torch.zeros_like(given["grad_streams"])
        streams[:, j] = given["grad_streams"][:, j]
        got = backward(OP, given | found | zeros | {"grad_streams": streams}, "ascending")["grad_residual"]
        assert_same(comb[:, :, j, None] * streams[:, None, j].float(), got, f"stream {j}")


def test_the_contracts_have_different_bits() -> None:
    """A name that meant the same as another one would promise nothing."""
    given = drawn(OP, 7, 96)
    assert len({digest(forward(OP, given, contract)["logits"]) for contract in CONTRACTS}) == len(CONTRACTS)
    known = given | forward(OP, given, "ascending")
    grads = {digest(backward(OP, known, contract)["grad_residual"]) for contract in CONTRACTS}
    assert len(grads) == len(CONTRACTS)


def test_the_public_function_and_its_backward() -> None:
    given = drawn(OP, 3, 8)
    leaves = {name: given[name].clone().requires_grad_() for name in ("residual", "weight", "gain", "bias")}
    results = samebits.mhc_pre(*leaves.values())
    torch.autograd.backward(results, [given[f"grad_{name}"] for name in ("hidden", "post", "comb")])
    found = forward(OP, given, "ascending")
    explicit = samebits.mhc_pre_backward(
        *(given[name] for name in ("grad_hidden", "grad_post", "grad_comb")), None,
        *(given[name] for name in ("residual", "weight", "gain")),
        *(found[name] for name in ("comb", "pre", "logits", "proj", "r", "q")),
        grad_dtype=torch.bfloat16,
    )  # fmt: skip
    for name, grad in zip(leaves, explicit, strict=True):
        assert grad is not None and leaves[name].grad is not None
        assert_same(grad, leaves[name].grad, name)
