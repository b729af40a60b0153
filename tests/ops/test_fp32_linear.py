"""``fp32_linear``: everything an operator must do, its orders, and the dtypes that are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from ops.fp32_products import covered
from torch import Tensor

from samebits import dispatch, fp32_linear, fp32_linear_backward, registry, timestep_mlp
from samebits.exact import fold
from samebits.exact.bits import digest
from samebits.exact.fma import fma
from samebits.ops.fp32_linear.cuda import plans
from samebits.runtime.device import H200
from samebits.runtime.sweep import calls
from samebits.verify import inputs
from samebits.verify.conformance import Conformance


class TestFp32Linear(Conformance):
    op = "fp32_linear"
    held: ClassVar = {"N": 20}
    cpu_patterns: ClassVar = ("normal", "wide", "nan", "tiny")
    batch_sizes: ClassVar = ((0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 70, 192, 193), (0, 1, 5, 17))
    wide_widths: ClassVar = (4096,)
    very_wide_widths: ClassVar = ((3584, 4095, 4097, 8193, 40000), (4097,))
    accuracy_widths: ClassVar = ((1, 17, 136, 1000), (1, 136))

    def _many_values(self, metafunc: pytest.Metafunc) -> Sequence[int]:
        """The chains over rows of the reference are many calls."""
        return (8193,)


def _given(rows: int, outputs: int, size: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, grad_y."""

    def row(name: str, width: int) -> Tensor:
        return inputs.row_tensor(f"fp32-test/{name}", range(rows), (width,), torch.float32).to(device)

    def shared(name: str, *shape: int, sample: str = "normal") -> Tensor:
        return inputs.parameter_tensor(f"fp32-test/{name}", shape, torch.float32, sample=sample).to(device)

    return (
        row("x", size),
        shared("weight", outputs, size, sample="small"),
        shared("bias", outputs),
        row("grad", outputs),
    )


def _chain(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros(())
    for a, b in zip(left, right, strict=True):
        total = fma(a, b, total)
    return total


@pytest.mark.parametrize(("outputs", "size"), [(3, 7), (2, 96), (2, 133), (66, 3)])
def test_the_orders_spelled_out(outputs: int, size: int) -> None:
    x, weight, bias, grad = _given(3, outputs, size)
    y = fp32_linear(x, weight, bias)
    grad_x, grad_weight, grad_bias = fp32_linear_backward(grad, x, weight)
    assert grad_x is not None and grad_weight is not None and grad_bias is not None
    lane_of = torch.arange(size) // 4 % 32
    for t, n in itertools.product(range(3), range(outputs)):
        lanes = [_chain(x[t, lane_of == u], weight[n, lane_of == u]) + 0.0 for u in range(32)]
        for half in (16, 8, 4, 2, 1):
            lanes = [lanes[u] + lanes[u + half] for u in range(half)]
        assert digest(lanes[0] + bias[n]) == digest(y[t, n])
    for t, k in itertools.product(range(3), range(size)):
        total = torch.zeros(())
        for start in range(0, outputs, 64):
            total = total + _chain(grad[t, start : start + 64], weight[start : start + 64, k])
        assert digest(total) == digest(grad_x[t, k])
    for n, k in itertools.product(range(outputs), range(size)):
        assert digest(_chain(grad[:, n], x[:, k])) == digest(grad_weight[n, k])
    assert digest(fold.left_fold(grad, 0)) == digest(grad_bias)


def test_two_of_them_are_the_linears_of_the_time_embedder() -> None:
    x, w1, b1, _ = _given(5, 40, 24)
    _, w2, b2, _ = _given(5, 12, 40)
    pre = fp32_linear(x, w1, b1)
    y = fp32_linear(pre / (1 + torch.exp(-pre)), w2, b2)
    assert digest(y) == digest(timestep_mlp(x, w1, b1, w2, b2))


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_anything_but_fp32_is_refused(at: int, dtype: torch.dtype) -> None:
    """Probe H7: an early cast of an FP32 path."""
    given = list(_given(3, 12, 16)[:3])
    given[at] = given[at].to(dtype)
    with pytest.raises(TypeError, match=r"expected torch\.float32"):
        fp32_linear(*given)


def test_an_early_cast_would_be_seen() -> None:
    """Probe H7: what the refusal protects from is not a matter of last bits."""
    x, weight, bias, _ = _given(5, 24, 96)
    exact = x.double() @ weight.double().T + bias.double()
    honest = (fp32_linear(x, weight, bias) - exact).abs().max()
    early = (fp32_linear(x.bfloat16().float(), weight, bias) - exact).abs().max()
    assert early > 50 * honest


KERNELS = {
    *("linear", "linear_tile", "lane_tile", "fold_lanes", "across", "across_tile", "chunk_tile", "fold_chunks"),
    *("weight_gradient", "weight_tile"),
}  # fmt: skip


def test_every_plan_covers_every_result() -> None:
    seen = set()
    for call in calls(registry.spec("fp32_linear"), H200, rows=(1, 3, 16, 193, 200_000)):
        n, k = call.size("N"), call.size("K")
        for plan in plans(call):
            seen |= covered(plan, call.rows, {"y": (n, k), "x": (k, n), "sums": (n, k)}, H200.shared_bytes)
    assert seen == KERNELS


def test_smaller_shared_memory_gets_smaller_tiles() -> None:
    """On a device with 99 KB for a block, as consumer cards have."""
    small = dataclasses.replace(H200, shared_bytes=99 * 1024)
    for call in calls(registry.spec("fp32_linear"), small, rows=(1, 264, 200_000)):
        assert plans(call)
        for plan in plans(call):
            assert all(step.shared <= small.shared_bytes for step in plan)


@pytest.mark.parametrize("backward", [False, True])
def test_a_misaligned_input_counts_for_the_kernels_that_read_it(backward: bool) -> None:
    """D1, D4. A bias is read number by number."""
    spec = registry.spec("fp32_linear")
    reads = {"y": ("x", "weight"), "sums": ("grad_y", "x"), "x": ("grad_y", "weight")}
    whole = next(
        call for call in calls(spec, H200, rows=(9,)) if call.backward == backward and call.aligned
        and (call.size("N"), call.size("K")) == (5376, 96) and len(call.wanted) == (3 if backward else 1)
    )  # fmt: skip
    for moved in (arg.name for arg in spec.direction(backward).inputs):
        layouts = tuple(
            (name, dataclasses.replace(layout, aligned=layout.aligned and name != moved))
            for name, layout in whole.layouts
        )
        for plan in plans(dataclasses.replace(whole, layouts=layouts)):
            for name, step in plan.steps:
                if "VEC" in dict(step.kernel.defines):
                    assert dict(step.kernel.defines)["VEC"] == (1 if moved in reads[name] else 8), (moved, name)
                assert not step.kernel.entry.endswith("_tile") or moved not in reads[name]


def test_which_tiles_come_first() -> None:
    first: dict[tuple[str, int, tuple[int, int]], str] = {}
    shapes = ((5376, 96), (96, 5376), (17, 96))
    for call in calls(registry.spec("fp32_linear"), H200, rows=(1, 64, 264, 4096)):
        shape = call.size("N"), call.size("K")
        if shape in shapes and call.aligned and len(call.wanted) == (3 if call.backward else 1):
            for name, step in plans(call)[0].steps:
                first[name, call.rows, shape] = step.kernel.name
    given, taken, odd = shapes
    assert not any(
        step.startswith(("linear_tile", "lane_tile", "weight_tile", "across_tile"))
        for key, step in first.items()
        if key[2] == odd
    )
    assert all(
        first["sums", rows, shape].startswith("weight_tile") for rows in (64, 264, 4096) for shape in (given, taken)
    )
    assert all(first["y", rows, given].startswith("linear_tile") for rows in (64, 264, 4096))
    assert "R=4" in first["y", 64, taken] and "GROUPS=4" in first["y", 264, taken]
    assert all("SPLIT=1" in first["x", rows, given] for rows in (1, 64, 264)), "columns are few: chunks are spread"
    assert first["x", 4096, given].startswith("chunk_tile") and "ALONG=2" in first["x", 264, taken]


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "size"), [(5376, 96), (5376, 32), (96, 5376), (32, 5376), (5376, 256)])
@pytest.mark.parametrize("rows", [1, 8, 17, 264, 1025])
def test_the_bits_at_the_sizes_of_the_model(outputs: int, size: int, rows: int) -> None:
    """Every plan against the reference, on the first, the last and some rows between; sums over rows at the fewer ones."""
    op = registry.operator("fp32_linear")
    x, weight, bias, grad = _given(rows, outputs, size, "cuda")
    some = sorted({0, 7 % rows, rows // 2, rows - 1})
    summed = rows <= 264
    y = op.forward(x[some], weight, bias, backend="reference")[0]
    grads = op.backward(grad, x, weight, backend="reference", wanted=(False, summed, summed))[1:]
    grad_x = op.backward(grad[some], x[some], weight, backend="reference", wanted=(True, False, False))[0]
    ready = [
        op.prepare(False, [x, weight, bias], [], "lanes32", "cuda"),
        op.prepare(True, [grad, x, weight], [], "lanes32", "cuda"),
    ]
    for index in range(max(len(plans(one.call)) for one in ready)):
        with dispatch.force_plan(index):
            got = op.forward(x, weight, bias, backend="cuda")[0]
            got_grads = op.backward(grad, x, weight, backend="cuda")
        assert got is not None and y is not None and digest(got[some]) == digest(y), index
        assert got_grads[0] is not None and grad_x is not None and digest(got_grads[0][some]) == digest(grad_x), index
        for expected, ours in zip(grads, got_grads[1:], strict=True):
            assert ours is not None
            assert not summed or (expected is not None and digest(expected) == digest(ours)), index
