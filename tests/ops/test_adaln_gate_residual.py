"""``adaln_gate_residual``: everything an operator must do, and the model's own operations."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from ops.segment_faults import FAULTS, assert_a_kernel_refuses, broken
from torch import Tensor

import samebits
from samebits import adaln_gate_residual, adaln_gate_residual_backward
from samebits.exact.bits import digest
from samebits.verify import inputs
from samebits.verify.conformance import Conformance

KINDS = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class TestAdalnGateResidual(Conformance):
    op = "adaln_gate_residual"
    held: ClassVar = {"R": 3}
    cpu_patterns: ClassVar = ("normal", "nan", "minus_zero")
    batch_sizes: ClassVar = ((0, 1, 7, 33, 129, 257, 1100), (0, 1, 7))
    odd_widths: ClassVar = ((1, 17, 63, 127, 129, 136, 264), (17, 136))
    wide_patterns: ClassVar = (("normal", "cancelling", "nan"), ("normal",))
    wide_widths: ClassVar = (5376,)
    very_wide_widths: ClassVar = ((4097, 7168, 16384, 131072), (4097,))
    accuracy_widths: ClassVar = ((1, 17, 136, 1000), (1, 136))


def _rows(name: str, rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return inputs.row_tensor(f"gate-test/{name}", range(rows), (size,), dtype)


def _given(
    positions: int, rows: int, size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> dict[str, Tensor]:
    index = inputs.index_tensor("gate-test/index", range(positions), rows, torch.int64)
    made = {
        "residual": _rows("residual", positions, size, dtype),
        "y": _rows("y", positions, size, dtype),
        "gate": _rows("gate", rows, size, dtype),
        "index": index,
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", [5376, 12, 13])
def test_the_bits_of_the_model(size: int, dtype: torch.dtype, device: str) -> None:
    """Forward, and the gradients of y and residual, which have no sum."""
    given = _given(37, 4, size, dtype, device)
    gate, index = given["gate"], given["index"]
    ours, theirs = ({n: given[n].clone().requires_grad_() for n in ("residual", "y")} for _ in range(2))
    out = adaln_gate_residual(ours["residual"], ours["y"], gate, index)
    expected = theirs["residual"] + gate[index] * theirs["y"]
    assert digest(out) == digest(expected)
    grad = _rows("grad", 37, size, dtype).to(device)
    out.backward(grad)
    expected.backward(grad)
    for name in ours:
        one, other = ours[name].grad, theirs[name].grad
        assert one is not None and other is not None and digest(one) == digest(other), name


def test_a_missing_rounding_would_be_seen() -> None:
    given = _given(37, 4, 72)
    residual, y, gate = (given[n].float() for n in ("residual", "y", "gate"))
    fused = (residual + gate[given["index"]] * y).bfloat16()
    assert not torch.equal(adaln_gate_residual(**given), fused)


@pytest.mark.parametrize("device", DEVICES)
def test_cotangents_of_a_batch_that_are_not_contiguous(device: str) -> None:
    given = _given(60, 4, 24, device=device)
    index, grad = given["index"][:30], _rows("grad", 60, 24).to(device)
    strided = grad.view(2, 30, 24).transpose(0, 1).contiguous().transpose(0, 1)
    found = []
    for upstream in (grad.view(2, 30, 24), strided):
        leaves = {n: given[n].clone().requires_grad_() for n in ("residual", "y", "gate")}
        shaped = (leaves["residual"].view(2, 30, 24), leaves["y"].view(2, 30, 24))
        with samebits.policy("silent"):
            adaln_gate_residual(*shaped, leaves["gate"], index).backward(upstream)
        found.append([digest(leaf.grad) for leaf in leaves.values() if leaf.grad is not None])
        assert leaves["residual"].grad is not None and digest(leaves["residual"].grad) == digest(grad)
    assert len(found[0]) == 3 and found[0] == found[1]


def test_the_gradient_of_the_gate_is_a_chunk_of_its_table() -> None:
    given = _given(40, 5, 24)
    given["index"][given["index"] == 3] = 1
    table = _rows("table", 5, 6 * 24).requires_grad_()
    gate = table.chunk(6, -1)[2]
    adaln_gate_residual(given["residual"], given["y"], gate, given["index"]).float().sum().backward()
    assert table.grad is not None
    assert not table.grad[:, :48].any() and not table.grad[:, 72:].any()
    assert not table.grad[3].any() and all(table.grad[row].any() for row in (0, 1, 2, 4))


def test_the_gradient_of_the_gate_is_rounded_once() -> None:
    """FP32 where it is asked for; the leaf gets that, rounded; a sum in BF16 would be far away."""
    given = _given(600, 2, 24)
    grad = _rows("grad", 600, 24)
    made = samebits.segments(given["index"], 2)
    _, exact = adaln_gate_residual_backward(grad, given["y"], given["gate"], made.index, made.order, made.bounds)
    gate = given["gate"].clone().requires_grad_()
    adaln_gate_residual(given["residual"], given["y"], gate, made).backward(grad)
    assert exact is not None and gate.grad is not None and exact.dtype == torch.float32
    assert digest(gate.grad) == digest(exact.bfloat16())
    golden = torch.zeros(2, 24, dtype=torch.float64).index_add_(0, given["index"], grad.double() * given["y"].double())
    assert (exact.double() - golden).abs().max() < 1e-4


@pytest.mark.parametrize("value", [-1, 3, 2**63 - 1])
def test_an_index_outside_the_table_is_refused(value: int) -> None:
    given = _given(5, 3, 16)
    given["index"][4] = value
    with pytest.raises(IndexError, match=rf"adaln_gate_residual: index is {value} at position 4, outside 0 \.\. 2"):
        adaln_gate_residual(**given)
    with pytest.raises(IndexError, match=f"{value}"):
        adaln_gate_residual_backward(given["y"], given["y"], given["gate"], given["index"])


def _backward_of(index: Tensor, order: Tensor, bounds: Tensor, device: str) -> tuple[Any, ...]:
    count, rows = index.shape[0], bounds.shape[0]
    made = (_rows("grad", count, 40), _rows("y", count, 40), _rows("gate", rows, 40), index, order, bounds)
    return tuple(tensor.to(device) for tensor in made)


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_that_is_not_of_the_index_is_refused(fault: str) -> None:
    with pytest.raises(IndexError, match=r"adaln_gate_residual: (order|bounds)"):
        adaln_gate_residual_backward(*_backward_of(*broken(fault), "cpu"))


_CHILD = """
import sys, torch
from ops.segment_faults import broken
from ops.test_adaln_gate_residual import _backward_of
from samebits import adaln_gate_residual_backward
adaln_gate_residual_backward(*_backward_of(*broken(sys.argv[1]), "cuda"), backend="cuda")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["order_outside", "overflowing", "a_tile_too_few", "a_position_twice"])
def test_a_kernel_asserts_what_is_not_of_the_index(fault: str) -> None:
    assert_a_kernel_refuses(_CHILD, fault)


@pytest.mark.gpu
def test_every_plan_at_full_width_with_many_tiles() -> None:
    given = _given(1500, 3, 5376, device="cuda")
    given["index"][given["index"] == 1] = 0  # one row has most of them, one none
    made, grad = samebits.segments(given["index"], 3), _rows("grad", 1500, 5376).cuda()
    saved = (grad, given["y"], given["gate"], made.index, made.order, made.bounds)
    expected = adaln_gate_residual_backward(*saved, backend="reference")
    for plan in range(2):
        with samebits.force_plan(plan):
            got = adaln_gate_residual_backward(*saved, backend="cuda")
        for one, other in zip(expected, got, strict=True):
            assert one is not None and other is not None and digest(one) == digest(other), plan
