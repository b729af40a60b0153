"""``rmsnorm_modulated``: everything an operator must do, the model's own operations, tables, batches and indices."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from ops.segment_faults import FAULTS, assert_a_kernel_refuses, broken
from torch import Tensor
from torch.nn import functional as F

import samebits
from samebits import rmsnorm, rmsnorm_modulated, rmsnorm_modulated_backward
from samebits.exact.bits import digest
from samebits.verify import inputs
from samebits.verify.conformance import Conformance
from samebits.verify.operators import OperatorSubject
from samebits.verify.subject import Batch
from samebits.verify.tolerance import judge

KINDS = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class TestRmsnormModulated(Conformance):
    op = "rmsnorm_modulated"
    held: ClassVar = {"R": 3}
    cpu_patterns: ClassVar = ("normal", "nan", "minus_zero")
    batch_sizes: ClassVar = ((0, 1, 7, 33, 129, 257, 1100), (0, 1, 7))
    odd_widths: ClassVar = ((1, 17, 63, 127, 129, 136, 264), (17, 136))
    wide_patterns: ClassVar = (("normal", "cancelling", "nan"), ("normal",))
    wide_widths: ClassVar = (5376,)
    very_wide_widths: ClassVar = ((2056, 4097, 5384, 7168, 16384, 131072), (4097,))
    accuracy_widths: ClassVar = ((1, 17, 136, 1000), (1, 136))


def _rows(name: str, rows: int, size: int, dtype: torch.dtype = torch.bfloat16, sample: str = "normal") -> Tensor:
    return inputs.row_tensor(f"modulated-test/{name}", range(rows), (size,), dtype, sample=sample)


def _index(positions: int, rows: int) -> Tensor:
    return inputs.index_tensor("modulated-test/index", range(positions), rows, torch.int64)


def _given(
    positions: int, rows: int, size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> dict[str, Tensor]:
    made = {
        "x": _rows("x", positions, size, dtype),
        "weight": _rows("weight", 1, size, dtype, "weight")[0],
        "shift": _rows("shift", rows, size, dtype),
        "scale": _rows("scale", rows, size, dtype),
        "index": _index(positions, rows),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


# --- its golden -------------------------------------------------------------------------------------------------------


def test_a_tie_of_the_stored_row_is_no_error_and_a_wrong_rstd_is_one() -> None:
    """At the model's width the FP64 row rounds to the other side here and there, where FP32 is as right."""
    sizes = {"H": 5376, "R": 9}
    subject = OperatorSubject("rmsnorm_modulated", None, "reference", torch.device("cpu"), None, 40, 0, sizes)
    batch = subject.batch(range(40))
    limit = subject.tolerance("scale", torch.float32, True)
    assert judge(subject.backward(batch)["scale"], subject.golden(batch, True)["scale"], limit)[1] is None
    saved = subject.forward(batch) | {"rstd": subject.forward(batch)["rstd"] * 1.01}
    wrong = dict(zip(("x", "weight", "shift", "scale"), _explicit(subject, batch, saved), strict=True))
    assert (
        judge(wrong["x"], subject.golden(batch, True)["x"], subject.tolerance("x", torch.float32, True))[1] is not None
    )


def _explicit(subject: OperatorSubject, batch: Batch, saved: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    return subject.op.backward(*subject.backward_inputs(batch, saved), **subject.scalars)


# --- the model's own operations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_modulation_is_the_operations_of_the_model(dtype: torch.dtype) -> None:
    """E18: Given the norm, on any machine: n * (1 + scale) + shift, one rounding for each."""
    given = _given(60, 4, 72, dtype)
    n, index = rmsnorm(given["x"], given["weight"]), given["index"]
    expected = n * (1.0 + given["scale"][index]) + given["shift"][index]
    assert digest(rmsnorm_modulated(**given)) == digest(expected)
    fewer = (n.float() * (1.0 + given["scale"].float()[index]) + given["shift"].float()[index]).to(dtype)
    assert dtype == torch.float32 or not torch.equal(fewer, expected)  # so a missing rounding would have been seen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", [12, 128, 256, 4096, 5376])
def test_the_bits_of_the_model(size: int, dtype: torch.dtype) -> None:
    for positions in (1, 777):
        given = _given(positions, 9, size, dtype, "cuda")
        n, index = F.rms_norm(given["x"], (size,), given["weight"], 1e-5), given["index"]
        expected = n * (1.0 + given["scale"][index]) + given["shift"][index]
        for backend in ("cuda", "reference"):
            assert digest(rmsnorm_modulated(**given, backend=backend)) == digest(expected), (positions, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_bits_of_the_model_on_a_batch(dtype: torch.dtype) -> None:
    given = _given(2 * 777, 9, 5376, dtype, "cuda")
    given["x"], given["index"] = given["x"].view(2, 777, 5376), given["index"][:777]
    n, index = F.rms_norm(given["x"], (5376,), given["weight"], 1e-5), given["index"]
    expected = n * (1.0 + given["scale"][index]) + given["shift"][index]
    assert digest(rmsnorm_modulated(**given)) == digest(expected)


@pytest.mark.gpu
def test_every_plan_at_full_width_with_many_tiles() -> None:
    """The conformance tests take few positions at this width; here a table row has several tiles."""
    given = _given(1500, 3, 5376, device="cuda")
    given["index"][given["index"] == 1] = 0  # one row has most of them, one none
    grad = _rows("grad", 1500, 5376).cuda()
    made = samebits.segments(given["index"], 3)
    rstd = torch.ops.samebits.rmsnorm_modulated(*given.values(), None, None, 1e-5, "torch", "reference")[1]
    saved = (given["x"], given["weight"], given["scale"], made.index, made.order, made.bounds, rstd)
    expected = rmsnorm_modulated_backward(grad, *saved, backend="reference")
    for plan in range(4):
        with samebits.force_plan(plan):
            got = rmsnorm_modulated_backward(grad, *saved, backend="cuda")
        for one, other in zip(expected, got, strict=True):
            assert one is not None and other is not None and digest(one) == digest(other), plan


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_a_wide_table_are_read_in_place(device: str) -> None:
    given = _given(40, 4, 72, device=device)
    table = torch.cat([given["shift"], given["scale"], given["shift"]], dim=1)
    wide = given | {"shift": table[:, :72], "scale": table[:, 72:144]}
    ready = samebits.explain("rmsnorm_modulated", *wide.values(), None, None)
    assert ready.copies == ()
    assert digest(rmsnorm_modulated(**wide)) == digest(rmsnorm_modulated(**given))


@pytest.mark.parametrize("device", DEVICES)
def test_an_expanded_table_is_one_row_for_all(device: str) -> None:
    given = _given(40, 4, 72, device=device)
    one = {name: given[name][:1] for name in ("shift", "scale")}
    expanded = {name: value.expand(4, 72) for name, value in one.items()}
    expected = rmsnorm_modulated(**(given | one | {"index": torch.zeros_like(given["index"])}))
    assert digest(rmsnorm_modulated(**(given | expanded))) == digest(expected)


def test_other_chunks_of_the_table_get_no_gradient() -> None:
    given = _given(40, 4, 24)
    table = _rows("table", 4, 6 * 24).requires_grad_()
    shift, scale, *_ = table.chunk(6, -1)
    rmsnorm_modulated(given["x"], given["weight"], shift, scale, given["index"]).float().sum().backward()
    assert table.grad is not None and table.grad[:, :48].any() and not table.grad[:, 48:].any()


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_its_items_one_after_the_other(device: str) -> None:
    """Forward and grad_x item by item; the gradients of what is shared as of one sequence b * S + s."""
    given = _given(2 * 300, 3, 40, device=device)
    index, flat = given["index"][:300], given["index"][:300].repeat(2)
    grad = _rows("grad", 600, 40).to(device)
    results = []
    for x, chosen in (
        (given["x"].view(2, 300, 40), index),
        (given["x"].view(2, 300, 40), samebits.segments(index, 3, batch=2)),
        (given["x"], flat),
        (given["x"].view(2, 1, 300, 40), index),
    ):
        leaves = {name: given[name].clone().requires_grad_() for name in ("weight", "shift", "scale")}
        rows = x.clone().requires_grad_()
        y = rmsnorm_modulated(rows, leaves["weight"], leaves["shift"], leaves["scale"], chosen)
        y.backward(grad.view(y.shape))
        gradients = [rows.grad, *(leaf.grad for leaf in leaves.values())]
        results.append([digest(y), *(digest(g) for g in gradients if g is not None)])
    assert len(results[0]) == 5 and all(result == results[0] for result in results)


# --- the index --------------------------------------------------------------------------------------------------------


def _gradients(given: dict[str, Any], change: Any = None) -> list[str]:
    leaves = {
        name: t.clone().requires_grad_() for name, t in given.items() if isinstance(t, Tensor) and name != "index"
    }
    y = rmsnorm_modulated(**leaves, index=given["index"])
    if change is not None:
        change()
    y.backward(_rows("grad", y.shape[0], y.shape[1]).to(y.device))
    return [digest(y), *(digest(leaf.grad) for leaf in leaves.values() if leaf.grad is not None)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_and_segments_give_the_same_bits(device: str) -> None:
    given = _given(600, 3, 40, device=device)
    plain = _gradients(given)
    assert len(plain) == 5
    assert _gradients(given | {"index": samebits.segments(given["index"], 3)}) == plain
    assert _gradients(given) == plain  # and from what was remembered


@pytest.mark.parametrize("device", DEVICES)
def test_the_backward_uses_the_index_of_the_forward(device: str) -> None:
    """The index is written in between: Segments are a snapshot, and with a tensor torch refuses the backward."""
    given = _given(600, 3, 40, device=device)
    plain = _gradients(given | {"index": given["index"].clone()})
    mutable = given["index"].clone()
    layout = samebits.segments(mutable, 3)
    assert _gradients(given | {"index": layout}, change=lambda: mutable.fill_(0)) == plain
    mutable.copy_(given["index"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(given | {"index": mutable}, change=lambda: mutable.fill_(0))
    changed = _gradients(given | {"index": mutable})  # the next call sees the new values
    assert changed == _gradients(given | {"index": torch.zeros_like(mutable)}) != plain


def test_a_write_that_torch_does_not_count_is_refused() -> None:
    """The forward reads the index as it is; what was sorted before is not of that index, and the backward says so."""
    given = _given(600, 3, 40, device="cpu")
    mutable = given["index"].clone()
    before = _gradients(given | {"index": mutable})
    mutable.data.fill_(0)
    given["x"].requires_grad_()
    given["shift"].requires_grad_()
    y = samebits.rmsnorm_modulated(**given | {"index": mutable})
    zeros = samebits.rmsnorm_modulated(**given | {"index": torch.zeros_like(mutable)})
    assert digest(y) == digest(zeros) != before[0]
    with pytest.raises(IndexError, match="order holds a position of another table row"):
        y.float().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_segments_pass_through_a_compiler(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, with the sorted positions in it: nothing sorts again."""
    given = _given(300, 3, 40, device=device)
    plain, made = _gradients(given), samebits.segments(given["index"], 3)
    for module in ("segmentation", "ops.rmsnorm.cuda", "ops.rmsnorm_modulated.reference"):
        monkeypatch.setattr(f"samebits.{module}.sorted_positions", None)
    compiled = torch.compile(rmsnorm_modulated, fullgraph=True, backend="aot_eager")
    leaves = {name: given[name].clone().requires_grad_() for name in ("x", "weight", "shift", "scale")}
    y = compiled(**leaves, index=made)
    y.backward(_rows("grad", 300, 40).to(device))
    assert [digest(y), *(digest(leaf.grad) for leaf in leaves.values() if leaf.grad is not None)] == plain


@pytest.mark.parametrize("value", [-1, 3, 2**63 - 1, -(2**63)])
def test_an_index_outside_the_table_is_refused(value: int) -> None:
    given = _given(5, 3, 16)
    given["index"][2] = value
    with pytest.raises(IndexError, match=rf"rmsnorm_modulated: index is {value} at position 2, outside 0 \.\. 2"):
        rmsnorm_modulated(**given)
    with pytest.raises(IndexError, match=f"{value}"):
        samebits.segments(given["index"], 3)
    with pytest.raises(
        IndexError, match=f"{value}"
    ):  # the backend checks too: nobody before it may have seen the values
        torch.ops.samebits.rmsnorm_modulated(*given.values(), None, None, 1e-5, "torch", None)


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_that_is_not_of_the_index_is_refused(fault: str) -> None:
    with pytest.raises(IndexError, match=r"rmsnorm_modulated: (order|bounds)"):
        rmsnorm_modulated_backward(*_backward_of(*broken(fault), "cpu"))


def _backward_of(index: Tensor, order: Tensor, bounds: Tensor, device: str, size: int = 40) -> tuple[Any, ...]:
    count, rows = index.shape[0], bounds.shape[0]
    given = (_rows("grad", count, size), _rows("x", count, size), _rows("w", 1, size)[0], _rows("scale", rows, size))
    made = (*given, index, order, bounds, torch.ones(count))
    return tuple(tensor.to(device) for tensor in made)


_CHILD = """
import sys, torch
from ops.segment_faults import broken
from ops.test_rmsnorm_modulated import _backward_of
from samebits import dispatch, rmsnorm_modulated_backward
with dispatch.force_plan(int(sys.argv[2])):
    rmsnorm_modulated_backward(*_backward_of(*broken(sys.argv[1]), "cuda"), backend="cuda")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "plan"),
    [*((fault, 0) for fault in FAULTS), ("order_outside", 1), ("descending", 1), ("a_position_twice", 1)],
)
def test_a_kernel_asserts_what_is_not_of_the_index(fault: str, plan: int) -> None:
    """Plan 0 has a kernel for grad_x and one for the sums, plan 1 one for both."""
    assert_a_kernel_refuses(_CHILD, fault, str(plan))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [-1, 3, 2**62])
def test_a_kernel_asserts_an_index_outside_the_table(value: int) -> None:
    code = f"""
import samebits, torch
x = torch.zeros(5, 16, device="cuda").bfloat16()
index = torch.zeros(5, dtype=torch.int64, device="cuda")
index[2] = {value}
samebits.rmsnorm_modulated  # registers the operator
given = (x, x[0].contiguous(), x[:3], x[:3], index, None, None, 1e-5, "torch", "cuda")
torch.ops.samebits.rmsnorm_modulated(*given)
"""
    assert_a_kernel_refuses(code, message="samebits: 0 <= index")
