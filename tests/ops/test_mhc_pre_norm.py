"""``mhc_pre_norm``: everything an operator must do, the composition it stands for, and the published bits."""

from __future__ import annotations

import hashlib

import pytest
import torch
from ops import controllers
from ops.controllers import CONTRACTS, Conformance, assert_same, backward, drawn, forward
from torch import Tensor

import samebits
from samebits.exact.bits import digest

OP = "mhc_pre_norm"


class TestMhcPreNorm(Conformance):
    op = "mhc_pre_norm"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_it_is_the_composition_of_the_two_operators(contract: str) -> None:
    given = drawn(OP, 6, 40)
    norm = "tree512" if contract.startswith("fast") else "ascending"
    eps, norm_eps = 1e-5, 1e-3
    found = forward(OP, given, contract, eps=eps, norm_eps=norm_eps)
    mixed = forward("mhc_pre", given, contract, eps=eps)
    normed = forward("rmsnorm_residual", given | {"x": mixed["hidden"]}, norm, eps=norm_eps)
    assert_same(normed["residual"], found["hidden"], "the copy that is not written twice")
    for name, value in (mixed | {"normalized": normed["y"], "rstd": normed["rstd"]}).items():
        assert_same(value, found[name], name)

    for absent in ((), ("grad_hidden",), ("grad_streams",), tuple(n for n in given if n.startswith("start_"))):
        known = {name: value for name, value in given.items() if name not in absent} | found
        got = backward(OP, known, contract)
        behind = known | {"grad_y": known["grad_normalized"], "x": found["hidden"]}
        skip = {"grad_residual": known["grad_hidden"]} if "grad_hidden" in known else {}
        expected = backward("rmsnorm_residual", behind | skip, norm)
        expected |= backward("mhc_pre", known | {"grad_hidden": expected.pop("grad_x")}, contract)
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert_same(value, got[name], f"{name} without {absent or 'nothing'}")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_frozen_controller_keeps_every_leg_of_the_streams(contract: str) -> None:
    controllers.assert_frozen_controller(OP, contract)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_padding_row_adds_nothing_to_any_gradient(contract: str) -> None:
    controllers.assert_padding_adds_nothing(OP, contract)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_batches_continue_one_chain(contract: str) -> None:
    controllers.assert_batches_continue(OP, contract)


def test_an_unused_hidden_has_no_gradient() -> None:
    """A model that norms the collapsed streams and drops them: no zeros are made, and the bits are those of zeros."""
    given = drawn(OP, 4, 16)
    names = ("residual", "weight", "gain", "bias", "gamma")
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    _, normalized, post, comb = samebits.mhc_pre_norm(*leaves.values())
    upstream = ("grad_normalized", "grad_post", "grad_comb")
    torch.autograd.backward([normalized, post, comb], [given[name] for name in upstream])
    known = {name: given[name] for name in (*upstream, *names)} | forward(OP, given, "ascending")
    zeros = known | {"grad_hidden": torch.zeros_like(given["grad_hidden"])}
    explicit = backward(OP, zeros, "ascending", grad_dtype=torch.bfloat16)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert_same(explicit[f"grad_{name}"], leaf.grad, name)


# --- the published manifest -------------------------------------------------------------------------------------------

FORWARD_DIGESTS = {
    "proj": "3c568c36bd3a848b",
    "r": "1e0aebf1c1829bcc",
    "logits": "6cd7ecab852d5394",
    "pre": "3f73eafd8f8e9709",
    "post": "dc42d166bfb37b49",
    "comb": "ecb2a76f3438f88c",
    "hidden": "ebb08aa5e7e53462",
    "normalized": "bbeeff6f9f6f9e6a",
}
BACKWARD_DIGESTS = {
    "grad_residual": "c75a2cc545414612",
    "grad_weight": "b8fdee5101e9befb",
    "grad_bias": "7ca8612dbd186669",
    "grad_gamma": "5055b0a729868cb3",
    "alpha_pre": "17b33ecba8f5bdfa",
    "alpha_post": "094b1f01caad8a33",
    "alpha_res": "ff77def690d9b24c",
}


def _generator(name: str) -> torch.Generator:
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.Generator().manual_seed(2026 + word)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the case draws FP32 numbers from torch.randn, whose bits need AVX2",
)
def test_published_digests() -> None:
    """Case ``packed_t7_odd`` of the public manifest (profile oracle-fp32-mhc-v1): T = 7, D = 128, through a whole block."""
    draws, upstream = _generator("packed_t7_odd"), _generator("packed_t7_odd.grad")

    def normal(*shape: int, source: torch.Generator = draws) -> Tensor:
        return torch.randn(*shape, generator=source)

    residual, sublayer = normal(7, 4, 128).bfloat16(), normal(7, 128).bfloat16()
    weight = normal(24, 512) * (1 / 512**0.5)
    alphas = [normal(1) * 0.5 for _ in range(3)]
    gain = torch.cat([alpha.expand(count) for alpha, count in zip(alphas, (4, 4, 16), strict=True)])
    bias, gamma = normal(24) * 0.1, 1 + normal(128) * 0.05
    parameters = {"weight": weight, "gain": gain, "bias": bias, "gamma": gamma}
    grad_streams = normal(7, 4, 128, source=upstream).bfloat16()
    grad_normalized = normal(7, 128, source=upstream).bfloat16()
    grad_hidden = (normal(7, 128, source=upstream) * 0.25).bfloat16()

    found = forward(OP, parameters | {"residual": residual}, "ascending")
    assert {name: digest(found[name])[:16] for name in FORWARD_DIGESTS} == FORWARD_DIGESTS
    _, _, grad_comb, grad_post = samebits.mhc_post_backward(
        grad_streams, residual, sublayer, found["comb"], found["post"], wanted=(False, False, True, True)
    )
    assert grad_comb is not None and grad_post is not None
    known = {"grad_hidden": grad_hidden, "grad_normalized": grad_normalized, "grad_streams": grad_streams}
    known |= {"grad_post": grad_post, "grad_comb": grad_comb, "residual": residual} | parameters
    grads = backward(OP, known | found, "ascending")
    for name, first, last in (("alpha_pre", 0, 4), ("alpha_post", 4, 8), ("alpha_res", 8, 24)):
        total = torch.zeros(1)
        for term in grads["grad_gain"][first:last]:
            total = total + term
        grads[name] = total
    assert {name: digest(grads[name])[:16] for name in BACKWARD_DIGESTS} == BACKWARD_DIGESTS
