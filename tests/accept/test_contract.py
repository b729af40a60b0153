"""The contract of a layer, its fingerprint, and the seal of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from samebits.accept import LayerContract, integer, published
from samebits.accept.batch import Batch

LAYER = LayerContract(hidden=128)
OTHER: dict[str, Any] = {
    "hidden": 256,
    "hc_mult": 2,
    "controller_n": 25,
    "sinkhorn_iters": 19,
    "mhc_eps": 1e-5,
    "rmsnorm_eps": 1e-5,
    "layer_index": 4,
    "placement": "tp-sharded",
    "fusion_mode": "fused-pre-norm",
    "trainability": "mixer-frozen",
    "schema_version": "p1-mhc-layer-v2",
    "numeric_profile": "mhc-tree256",
}
FREE = {"hidden", "layer_index", "placement", "fusion_mode", "trainability"}


def test_every_field_is_tried() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(LayerContract)}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_the_fingerprint_covers_whatever_decides_a_bit(name: str) -> None:
    changed = dataclasses.replace(LAYER, **{name: OTHER[name]})
    assert (changed.fingerprint() != LAYER.fingerprint()) == (name not in ("layer_index", "placement"))
    assert len(LAYER.fingerprint()) == 64 and LayerContract(hidden=128).fingerprint() == LAYER.fingerprint()


@pytest.mark.parametrize("name", sorted(OTHER))
def test_validate_refuses_what_the_profile_fixes(name: str) -> None:
    LAYER.validate()
    changed = dataclasses.replace(LAYER, **{name: OTHER[name]})
    if name in FREE:
        changed.validate()
    else:
        with pytest.raises(ValueError, match=name):
            changed.validate()


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden", 0), ("layer_index", -1), ("placement", "pp"), ("fusion_mode", "all"), ("trainability", "none")],
)
def test_validate_refuses_what_nobody_knows(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(LAYER, **{name: value}).validate()


@pytest.mark.parametrize("name", ["controller", "alpha_pre", "alpha_post", "alpha_res", "bias", "gamma"])
def test_the_seal_breaks_with_any_weight(name: str) -> None:
    batch = integer.batch(2, LAYER)
    batch.check_seal()
    weight = getattr(batch.weights, name)
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(torch.inf))
    with pytest.raises(ValueError, match="sealed"):
        batch.check_seal()


def test_the_seal_breaks_with_the_contract_and_an_unsealed_batch_has_none() -> None:
    batch = integer.batch(2, LAYER)
    with pytest.raises(ValueError, match="sealed"):
        dataclasses.replace(batch, contract=dataclasses.replace(LAYER, trainability="mixer-frozen")).check_seal()
    with pytest.raises(ValueError, match="sealed"):
        dataclasses.replace(batch, seal="").check_seal()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("r_old", lambda t: t.float()),
        ("r_old", lambda t: t[:, :3]),
        ("y", lambda t: t[:1]),
        ("d_r_new", lambda t: t.flatten(1)),
        ("token_id", lambda t: t.int()),
    ],
)
def test_a_batch_of_other_shapes_cannot_be_sealed(name: str, change: Any) -> None:
    batch = integer.batch(2, LAYER)
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(batch, **{name: change(getattr(batch, name))}).sealed()


def test_gamma_must_be_float32() -> None:
    """It was BF16 once; the bytes are others."""
    batch = published.batch("one_row", 1, LAYER)
    weights = dataclasses.replace(batch.weights, gamma=batch.weights.gamma.bfloat16())
    with pytest.raises(ValueError, match=r"gamma is bfloat16 \(128,\); the contract needs float32 \(128,\)"):
        dataclasses.replace(batch, weights=weights).sealed()


def test_rows_of_a_batch_are_copies_and_the_fingerprint_sees_every_tensor() -> None:
    batch = integer.batch(3, LAYER)
    before = batch.fingerprint()
    batch.only([1]).r_old.zero_()
    assert batch.fingerprint() == before
    tensors = [
        field.name for field in dataclasses.fields(Batch) if isinstance(getattr(batch, field.name), torch.Tensor)
    ]
    assert len(tensors) == 6
    for name in tensors:
        changed = dataclasses.replace(batch, **{name: getattr(batch, name).flip(0)})
        assert changed.fingerprint() != before
