"""The inputs of the cases: the published recipe word for word, and integers that no machine changes."""

from __future__ import annotations

import hashlib
import math

import torch

from samebits.accept import LayerContract, integer, published
from samebits.accept.cases import CASES, MANIFEST_CASES, chosen
from samebits.exact.bits import digest

LAYER = LayerContract(hidden=128)


def test_the_published_recipe() -> None:
    """Spelled out again, draw by draw."""

    def generator(name: str) -> torch.Generator:
        seed = 2026 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        return torch.Generator().manual_seed(seed)

    batch = published.batch("packed_t7_odd", 7, LAYER)
    source = generator("packed_t7_odd")
    draws = {
        "r_old": torch.randn(7, 4, 128, generator=source).bfloat16(),
        "y": torch.randn(7, 128, generator=source).bfloat16(),
        "controller": torch.randn(24, 512, generator=source) * (1 / math.sqrt(512)),
        "alpha_pre": torch.randn(1, generator=source) * 0.5,
        "alpha_post": torch.randn(1, generator=source) * 0.5,
        "alpha_res": torch.randn(1, generator=source) * 0.5,
        "bias": torch.randn(24, generator=source) * 0.1,
        "gamma": 1 + torch.randn(128, generator=source) * 0.05,
    }
    source = generator("packed_t7_odd.grad")
    draws |= {
        "d_r_new": torch.randn(7, 4, 128, generator=source).bfloat16(),
        "d_normalized": torch.randn(7, 128, generator=source).bfloat16(),
        "d_residual": (torch.randn(7, 128, generator=source) * 0.25).bfloat16(),
    }
    for name, wanted in draws.items():
        held = getattr(batch, name, None)
        found = getattr(batch.weights, name) if held is None else held
        assert found.dtype == wanted.dtype and digest(found) == digest(wanted), name
    assert batch.token_id.tolist() == list(range(1000, 1007))


def test_the_gain_is_the_alphas_4_4_and_16_times() -> None:
    weights = published.batch("one_row", 1, LAYER).weights
    parts = [weights.alpha_pre] * 4 + [weights.alpha_post] * 4 + [weights.alpha_res] * 16
    assert digest(weights.gain()) == digest(torch.cat(parts))


def test_integer_inputs_are_the_same_on_every_machine() -> None:
    """Digests of what is drawn: integers, so a vector unit or a library version cannot move them."""
    batch = integer.batch(16, LAYER)
    found = {
        name: digest(getattr(batch, name))[:16] for name in ("r_old", "y", "d_r_new", "d_normalized", "d_residual")
    }
    found |= {name: digest(getattr(batch.weights, name))[:16] for name in ("controller", "bias", "gamma")}
    assert found == RECORDED


def test_integer_tokens_depend_on_their_id_only() -> None:
    few, many = integer.batch(3, LAYER), integer.batch(7, LAYER)
    assert digest(few.r_old) == digest(many.r_old[:3]) and digest(few.d_residual) == digest(many.d_residual[:3])
    assert digest(few.weights.controller) == digest(many.weights.controller)


def test_padding_puts_zeros_between_the_same_tokens() -> None:
    plain, padded = integer.batch(7, LAYER), integer.batch(7, LAYER, padding=(3, 8))
    kept = padded.only([0, 1, 2, 4, 5, 6, 7])
    assert padded.rows == 9 and kept.fingerprint() == plain.fingerprint()
    for name in ("token_id", "r_old", "y", "d_r_new", "d_normalized", "d_residual"):
        assert not getattr(padded, name)[[3, 8]].any()


def test_the_cases() -> None:
    assert MANIFEST_CASES == ("one_row", "packed_t16", "packed_t7_odd", "fused_pre_norm", "mixer_frozen")
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        case.contract.validate()
        assert case.contract.layer_index == 3 and (case.family != "published" or case.contract.hidden == 128)
        workload = case.workload(torch.device("cpu"))
        assert workload.rows == case.rows
        assert workload.fingerprint() == case.workload(torch.device("cpu")).fingerprint()
    widths = {case.contract.hidden for case in CASES}
    assert {128, 4096, 7168} < widths and any(width % 8 for width in widths)
    assert chosen(["rms_edges", "one_row", "rms_edges"]) == (chosen(["rms_edges"])[0], chosen(["one_row"])[0])


RECORDED = {
    "r_old": "8419ee7b4f7296f8",
    "y": "ac292d767cfbaf69",
    "d_r_new": "3c6b1aec38eb3dbb",
    "d_normalized": "a51f70c2e1cc3a22",
    "d_residual": "cc2ac2747f1f9a23",
    "controller": "f4820366642ad37e",
    "bias": "bfbabebe4a1605ef",
    "gamma": "ae3a28182ac4cc8d",
}
