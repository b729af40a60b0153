"""``qk_norm_rope``: everything an operator must do, and the bits of its two steps, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from ops.heads import DEVICES, KINDS, HeadBits, fused_parts, rows_of
from torch import Tensor
from torch.nn import functional as F

import samebits
from samebits import (
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_rmsnorm,
    qk_rmsnorm_backward,
    registry,
    rope_3axis,
    rope_3axis_backward,
)
from samebits.dispatch import Call
from samebits.exact.bits import digest
from samebits.models.minimax_h3 import peer
from samebits.ops.qk_norm_rope.cuda import plans
from samebits.runtime.device import H200
from samebits.runtime.sweep import dense_layout
from samebits.verify.conformance import Conformance

SHAPES = [(56, 128, 96), (3, 64, 64), (2, 256, 96), (5, 24, 12), (1, 17, 6)]


class TestQkNormRope(HeadBits, Conformance):
    op = "qk_norm_rope"
    held: ClassVar = {"D": 64, "R": 48}


class TestOddHeads(HeadBits):
    """Halves that are no whole vectors, in heads that are none either."""

    op = "qk_norm_rope"
    held: ClassVar = {"D": 19, "R": 14}
    odd_widths: ClassVar = ((1, 3, 17), (2,))
    cpu_patterns: ClassVar = ("normal",)
    wide_widths: ClassVar = (5,)
    very_wide_widths: ClassVar = ((129,), (9,))


def _given(positions: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    heads, size, width = shape
    made = {name: rows_of(name, (positions, heads, size), dtype) for name in ("x", "grad")}
    made |= {name: rows_of(name, (positions, width), torch.float32) for name in ("cos", "sin")}
    made["weight"] = rows_of("weight", (1, size), dtype, "weight")[0]
    return {name: tensor.to(device) for name, tensor in made.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_the_two_steps(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    given = _given(11, shape, dtype, device)
    x, weight, cos, sin, grad = (given[name] for name in ("x", "weight", "cos", "sin", "grad"))
    y, rstd = torch.ops.samebits.qk_norm_rope(x, weight, cos, sin, 1e-5, "torch", None)
    assert digest(y) == digest(rope_3axis(qk_rmsnorm(x, weight), cos, sin))
    (between,) = rope_3axis_backward(grad, cos, sin)
    assert between is not None and between.dtype == dtype
    for kind in {torch.float32, dtype}:
        got = qk_norm_rope_backward(grad, x, weight, cos, sin, rstd, grad_dtype=kind)
        expected = qk_rmsnorm_backward(between, x, weight, rstd, grad_dtype=kind)
        for one, other in zip(got, expected, strict=True):
            assert one is not None and other is not None and digest(one) == digest(other)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_through_autograd_are_those_of_the_two_steps(device: str) -> None:
    given = _given(60, (5, 128, 96), torch.bfloat16, device)  # more than one tile, the second from inside a position
    found = []
    for fused in (True, False):
        x, weight = (given[name].clone().requires_grad_() for name in ("x", "weight"))
        angles = given["cos"], given["sin"]
        y = qk_norm_rope(x, weight, *angles) if fused else rope_3axis(qk_rmsnorm(x, weight), *angles)
        y.backward(given["grad"])
        found.append([digest(t) for t in (y.detach(), x.grad, weight.grad) if t is not None])
    assert len(found[0]) == 3 and found[0] == found[1]


def test_a_missing_rounding_would_be_seen() -> None:
    """Of the normalised head, and of the gradient between the steps."""
    given = _given(11, (3, 128, 96), torch.bfloat16, "cpu")
    wide = {name: tensor.float() for name, tensor in given.items()}
    x, weight, cos, sin, grad = (given[name] for name in ("x", "weight", "cos", "sin", "grad"))
    y, rstd = torch.ops.samebits.qk_norm_rope(x, weight, cos, sin, 1e-5, "torch", None)
    angles = [given[name].bfloat16().float() for name in ("cos", "sin")]
    unrounded = rope_3axis(qk_rmsnorm(wide["x"], wide["weight"]), *angles).bfloat16()
    assert (unrounded != y).float().mean() > 0.05
    (between,) = rope_3axis_backward(wide["grad"], *angles)
    assert between is not None
    loose, _ = qk_rmsnorm_backward(between, wide["x"], wide["weight"], rstd)
    exact, _ = qk_norm_rope_backward(grad, x, weight, cos, sin, rstd)
    assert loose is not None and exact is not None and (loose != exact).float().mean() > 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_fused_projection_are_read_in_place(device: str) -> None:
    given = _given(7, (3, 128, 96), torch.bfloat16, device)
    weight, cos, sin = given["weight"], given["cos"], given["sin"]
    for part in fused_parts(device):
        with samebits.policy("strict"):
            got = qk_norm_rope(part, weight, cos, sin)
        assert digest(got) == digest(qk_norm_rope(part.contiguous(), weight, cos, sin))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_bits_of_diffusers(dtype: torch.dtype) -> None:
    given = _given(777, (56, 128, 96), dtype, "cuda")
    x, weight, cos, sin = (given[name] for name in ("x", "weight", "cos", "sin"))
    normed = F.rms_norm(x[None], (128,), weight, 1e-5)
    assert digest(qk_norm_rope(x[None], weight, cos, sin)) == digest(
        peer.modeling()._apply_rotary_emb(normed, cos, sin)
    )


def test_angles_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(5, 3, 16), torch.ones(16)
    for width in (13, 18):
        with pytest.raises(
            ValueError, match=f"R = {width} columns; accepted is an even number up to the head dimension 16"
        ):
            qk_norm_rope(x, weight, torch.zeros(5, width), torch.zeros(5, width))
    with pytest.raises(ValueError, match=r"qk_norm_rope: cos has shape \(4, 12\)"):
        qk_norm_rope(x, weight, torch.zeros(4, 12), torch.zeros(5, 12))


# --- launch plans -----------------------------------------------------------------------------------------------------


def _planned(rows: int, backward: bool, heads: int = 56, device: Any = H200, **changed: Any) -> list[list[Any]]:
    spec = registry.spec("qk_norm_rope")
    sizes = {"N": heads, "D": 128, "R": 96} | changed
    direction = spec.direction(backward)
    layouts = tuple((a.name, dense_layout(a, a.dtypes[0], sizes)) for a in direction.inputs)
    wanted = tuple(result.name for result in direction.results)
    call = Call(spec.name, backward, "torch", rows, tuple(sizes.items()), layouts, wanted, "float32", device)
    return [list(plan) for plan in plans(call)]


@pytest.mark.parametrize("rows, heads", [(1, 1), (264, 56), (3160, 56), (7, 3), (9, 300)])
def test_plans_cover_every_row_of_heads(rows: int, heads: int) -> None:
    for (step,) in _planned(rows, False, heads):
        (across,) = step.arguments
        positions = step.block // 16 // across
        assert positions * step.grid >= rows and (step.grid - 1) * positions < rows, "and no block is idle"
        assert step.block % 32 == 0 and across * 7 * -(-heads // (16 * 7)) >= heads, "in as few turns as there must be"
    for step, fold in _planned(rows, True, heads):
        assert step.arguments == (256,) and step.grid == -(-rows * heads // 256) and fold.grid == 16
        assert 256 % (step.block // 16 * dict(step.kernel.defines)["EACH"]) == 0, "groups never begin inside a pair"


def test_the_fewer_the_tiles_the_more_threads_share_one() -> None:
    blocks = [[step.block for step, _ in _planned(rows, True)] for rows in (264, 925, 3160, 16384)]
    assert [found[0] for found in blocks] == [512, 256, 128, 128]
    assert all(sorted(found) == [128, 256, 512] for found in blocks), "every plan is there to be tested"


def test_a_smaller_multiprocessor_gets_smaller_blocks() -> None:
    small = dataclasses.replace(H200, shared_bytes=64 * 1024)
    assert [step.block for step, _ in _planned(264, True, device=small)] == [128, 256]


def test_vectors_only_where_they_are_rotated_alike() -> None:
    vec = [
        dict(_planned(5, False, **sizes)[0][0].kernel.defines)["VEC"]
        for sizes in ({}, {"R": 64}, {"R": 24}, {"D": 132})
    ]
    assert vec == [8, 8, 1, 1]
    assert registry.spec("qk_norm_rope").misfit({"N": 56, "D": 128, "R": 97}), "refused before it is planned"


@pytest.mark.parametrize("op", ["qk_norm_rope", "qk_rmsnorm", "rope_3axis"])
@pytest.mark.parametrize("backward", [False, True])
def test_one_misaligned_input_is_enough(op: str, backward: bool) -> None:
    """Every pointer counts but that of rstd, which is read number by number."""
    spec = registry.spec(op)
    sizes = {axis: {"N": 56, "D": 128, "R": 96}[axis] for axis, _, _ in spec.size_limits}
    direction = spec.direction(backward)
    for misaligned in ("", *(arg.name for arg in direction.inputs)):
        layouts = tuple(
            (a.name, dataclasses.replace(dense_layout(a, a.dtypes[0], sizes), aligned=a.name != misaligned))
            for a in direction.inputs
        )
        wanted = tuple(result.name for result in direction.results)
        call = Call(op, backward, "torch", 9, tuple(sizes.items()), layouts, wanted, "float32", H200)
        for step in (step for plan in plans(call) for step in plan if step.kernel.entry != "fold_weight"):
            assert dict(step.kernel.defines)["VEC"] == (8 if misaligned in ("", "rstd") else 1), misaligned


def test_more_blocks_than_a_launch_can_have_are_refused() -> None:
    assert (
        _planned(2**31 - 1, False) != [] and _planned(2**31, False, 1) == [] and _planned(2**31 - 1, True, 2**16) == []
    )
