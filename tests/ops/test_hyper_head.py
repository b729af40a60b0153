"""``hyper_head``: everything an operator must do, and the composition it stands for."""

from __future__ import annotations

import pytest
import torch
from ops import controllers
from ops.controllers import CONTRACTS, Conformance, assert_same, backward, drawn, forward

import samebits
from samebits import registry
from samebits.ops.hyper_head import reference

OP = "hyper_head"


class TestHyperHead(Conformance):
    op = "hyper_head"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_it_is_the_composition_of_the_single_operators(contract: str) -> None:
    given = drawn(OP, 6, 40)
    residual, weight, gain = given["residual"], given["weight"], given["gain"]
    over_d = "tree256" if contract.startswith("fast") else "ascending"
    x = residual.flatten(-2)
    projection = registry.operator("fp32_gemm_rms")

    found = forward(OP, given, contract)
    proj, r, q = projection.forward(x, weight, contract=contract)
    logits = ((r[:, None] * proj) * gain) + given["bias"]
    gate = torch.sigmoid(logits)
    pre = gate + torch.tensor(1e-6)
    hidden = samebits.h_aggregate(pre, residual, contract=over_d)
    for name, value in {"hidden": hidden, "pre": pre, "logits": logits, "proj": proj, "r": r, "q": q}.items():
        assert_same(value, found[name], name)

    got = backward(OP, given | found, contract)
    grad_pre, collapse_leg = samebits.h_aggregate_backward(given["grad_hidden"], pre, residual, contract=over_d)
    grad_logits = grad_pre * (gate * (1 - gate))
    scaled = grad_logits * gain
    grad_r = ((scaled[:, 0] * proj[:, 0] + scaled[:, 1] * proj[:, 1]) + scaled[:, 2] * proj[:, 2]) + (
        scaled[:, 3] * proj[:, 3]
    )
    grad_x, grad_weight = projection.backward(
        scaled * r[:, None], grad_r, x, weight, r, q, given["start_weight"], contract=contract
    )
    grad_gain, grad_bias = given["start_gain"], given["start_bias"]
    for t in range(6):
        grad_gain = grad_gain + grad_logits[t] * (r[t] * proj[t])
        grad_bias = grad_bias + grad_logits[t]
    assert collapse_leg is not None and grad_x is not None and grad_weight is not None
    assert_same(collapse_leg + grad_x.view_as(residual), got["grad_residual"], "grad_residual")
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


def test_saturated_gates() -> None:
    """sigmoid saturates to exactly 1 and 0; the eps of the contract is added to both, and there is no factor of 2."""
    given = drawn(OP, 1, 8)
    given["residual"] = torch.ones(1, 4, 8).bfloat16()
    given |= {"gain": torch.zeros(4), "bias": torch.tensor([100.0, -100.0, -100.0, -100.0])}
    found = forward(OP, given, "ascending")
    assert found["pre"][0].tolist() == pytest.approx([1.000001, 1e-6, 1e-6, 1e-6], rel=1e-7)
    assert (found["hidden"] == 1).all()


def test_a_gate_is_that_of_its_token_alone() -> None:
    """A library's sigmoid may take other code for the last elements of a dense tensor, which another batch ends elsewhere."""
    logits = 4 * torch.randn(1027, 4, generator=torch.Generator().manual_seed(0))
    together = reference.gate(logits)
    alone = torch.cat([reference.gate(row[None].clone()) for row in logits])
    assert_same(together, alone, "gates")
