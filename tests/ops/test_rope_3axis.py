"""``rope_3axis``: everything an operator must do, and the bits of diffusers' own function and of its derivative."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from ops.heads import DEVICES, KINDS, HeadBits, fused_parts, rows_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import samebits
from samebits import rope_3axis, rope_3axis_backward, rope_3axis_tables
from samebits.exact.bits import digest
from samebits.models.minimax_h3 import peer
from samebits.ops.rope_3axis.reference import gradient, rotated
from samebits.verify import inputs
from samebits.verify.conformance import Conformance

SHAPES = [(56, 128, 96), (3, 64, 64), (2, 256, 96), (1, 16, 12), (5, 17, 6)]


class TestRope(HeadBits, Conformance):
    op = "rope_3axis"
    held: ClassVar = {"D": 64, "R": 48}


class TestOddHeads(HeadBits):
    """Halves that are no whole vectors, in heads that are none either."""

    op = "rope_3axis"
    held: ClassVar = {"D": 19, "R": 14}
    odd_widths: ClassVar = ((1, 3, 17), (3,))


def _positions(count: int) -> Tensor:
    return inputs.row_tensor("rope-test/positions", range(count), (3,), torch.float32).double() * 40


def _bits(tensor: Tensor) -> str:
    return digest(tensor.detach())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_diffusers_and_of_its_autograd(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    heads, size, width = shape
    x, grad = (rows_of(name, (13, heads, size), dtype)[None].to(device) for name in ("x", "grad"))
    cos, sin = (rows_of(name, (13, width), torch.float32).to(device) for name in ("cos", "sin"))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = rope_3axis(ours, cos, sin), peer.modeling()._apply_rotary_emb(theirs, cos, sin)
    assert _bits(y) == _bits(expected)
    y.backward(grad)
    expected.backward(grad)
    assert ours.grad is not None and theirs.grad is not None and _bits(ours.grad) == _bits(theirs.grad)


def test_what_autograd_adds_would_be_seen() -> None:
    """Its slices turn -0 into +0, and it rounds products and sums: the forward with a negated sine will not do."""
    grad, cos, sin = (
        rows_of("grad", (13, 2, 128)),
        rows_of("cos", (13, 96), torch.float32),
        rows_of("sin", (13, 96), torch.float32),
    )
    expected = gradient(grad, cos, sin)
    assert not (expected.signbit() & (expected == 0)).any() and (grad.signbit() & (grad == 0)).any()
    swapped = torch.cat((sin[:, 48:], sin[:, :48]), -1)
    assert _bits(rotated(grad, cos, -swapped)) != _bits(expected)  # the same but for zeros
    assert torch.equal(rotated(grad, cos, -swapped), expected)
    c, s = (a.bfloat16().double()[:, None, :48] for a in (cos, swapped))
    once = (grad[..., :48].double() * c + grad[..., 48:96].double() * s).to(torch.bfloat16)
    assert (once != expected[..., :48]).float().mean() > 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_the_tables_of_diffusers(device: str) -> None:
    for count in (0, 1, 37):
        positions = _positions(count).to(device)
        for frequencies, theta in ((16, 10000.0), (2, 500.0)):
            module = peer.modeling().MiniMaxH3RotaryPosEmbed(frequencies, theta).to(device)
            made = rope_3axis_tables(positions, frequencies=frequencies, theta=theta)
            assert [_bits(t) for t in made] == [_bits(t) for t in module(positions)]
            assert all(t.shape == (count, 6 * frequencies) and t.dtype == torch.float32 for t in made)
    one = rope_3axis_tables(_positions(2).to(device))[0]
    moved = rope_3axis_tables(
        _positions(2).to(device) + torch.tensor([0.0, 1.0, 0.0], device=device, dtype=torch.float64)
    )[0]
    changed = (one != moved).any(0)
    assert changed[16:32].any() and changed[64:80].any() and not changed[:16].any() and not changed[32:64].any()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"position_ids": [[1, 2, 3]]}, TypeError, "must be a torch.Tensor, not list"),
        ({"position_ids": torch.zeros(2, 3, dtype=torch.bool)}, TypeError, "torch.bool"),
        ({"position_ids": torch.zeros(2, 4)}, ValueError, r"shape \(2, 4\), expected \(S, 3\)"),
        ({"frequencies": 0}, ValueError, "at least 1, got 0"),
        ({"frequencies": 1.5}, TypeError, "an integer, not 1.5"),
        ({"theta": float("nan")}, ValueError, "finite and above 0"),
    ],
)
def test_tables_refuse(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rope_3axis_tables(**{"position_ids": torch.zeros(2, 3)} | given)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_fused_projection_are_read_in_place(device: str) -> None:
    """q and k as diffusers cuts them from to_qkv, one batch and two."""
    cos, sin = (t.to(device) for t in rope_3axis_tables(_positions(7)))
    for part in fused_parts(device):
        with samebits.policy("strict"):
            got = rope_3axis(part, cos, sin)
        assert _bits(got) == _bits(peer.modeling()._apply_rotary_emb(part, cos, sin))


def test_angles_that_do_not_fit_are_refused() -> None:
    x, cos = torch.zeros(2, 5, 3, 16), torch.zeros(5, 12)
    for width in (13, 18):
        wide = torch.zeros(5, width)
        with pytest.raises(
            ValueError, match=f"R = {width} columns; accepted is an even number up to the head dimension 16"
        ):
            rope_3axis(x, wide, wide)
        with pytest.raises(ValueError, match=f"R = {width} columns"):
            rope_3axis_backward(x[0], wide, wide)
        mode, part = FakeTensorMode(), x[0]
        with mode, pytest.raises(ValueError, match=f"R = {width} columns"):
            torch.ops.samebits.rope_3axis(*map(mode.from_tensor, (part, wide, wide)), "torch", None)
    with pytest.raises(ValueError, match=r"rope_3axis: sin has shape \(4, 12\), expected \(5, R\) or \(2, 5, R\)"):
        rope_3axis(x, cos, cos[:4])
    with pytest.raises(ValueError, match=r"rope_3axis: x has shape \(3, 16\), expected"):
        rope_3axis(x[0, 0], cos, cos)
    with pytest.raises(TypeError, match=r"rope_3axis: cos must be a torch.Tensor, not list"):
        rope_3axis(x, [[1.0]], cos)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cos has dtype torch\.bfloat16, expected torch\.float32"):
        rope_3axis(x, cos.bfloat16(), cos)


def test_channels_behind_are_copied_with_their_payload() -> None:
    x = torch.full((1, 1, 8), 0x7F81, dtype=torch.int16).view(torch.bfloat16)  # a NaN that no conversion gives
    y = rope_3axis(x, torch.ones(1, 4), torch.zeros(1, 4))
    assert y.view(torch.int16)[0, 0, 4:].tolist() == [0x7F81] * 4
