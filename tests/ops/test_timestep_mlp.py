"""``timestep_mlp``: everything an operator must do, its orders spelled out, and the dtypes that are refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from ops.fp32_products import covered
from torch import Tensor

from samebits import dispatch, registry, timestep_mlp, timestep_mlp_backward
from samebits.exact import fold
from samebits.exact.bits import digest
from samebits.exact.fma import fma
from samebits.ops.timestep_mlp import reference
from samebits.ops.timestep_mlp.cuda import plans
from samebits.runtime.device import H200
from samebits.runtime.sweep import calls
from samebits.verify import inputs
from samebits.verify.conformance import Conformance

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


class TestTimestepMlp(Conformance):
    op = "timestep_mlp"
    held = {"F": 20, "D": 12}  # noqa: RUF012
    cpu_patterns = ("normal", "wide", "nan", "tiny")
    batch_sizes = ((0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 70, 192, 193), (0, 1, 5, 17))
    wide_widths = (4096,)
    very_wide_widths = ((3584, 4095, 4097, 8193, 40000), (4097,))
    accuracy_widths = ((1, 17, 136, 1000), (1, 136))

    def _many_values(self, metafunc: pytest.Metafunc) -> tuple[int, ...]:
        """The chains over rows of the reference are many calls; 131073 rows without them are tested below."""
        return (8193,)


def _parameters(k: int, f: int, d: int, device: str = "cpu") -> list[Tensor]:
    def draw(name: str, shape: tuple[int, ...], sample: str) -> Tensor:
        return inputs.parameter_tensor(f"mlp-test/{name}", shape, torch.float32, sample=sample).to(device)

    return [
        draw("w1", (f, k), "small"),
        draw("b1", (f,), "normal"),
        draw("w2", (d, f), "small"),
        draw("b2", (d,), "normal"),
    ]


def _rows(name: str, rows: int, width: int, device: str = "cpu") -> Tensor:
    return inputs.row_tensor(f"mlp-test/{name}", range(rows), (width,), torch.float32).to(device)


# --- the orders -------------------------------------------------------------------------------------------------------


def _spelled_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """One number at a time."""
    out = torch.empty(x.shape[0], w.shape[0])
    for t, n in itertools.product(range(x.shape[0]), range(w.shape[0])):
        lanes = [torch.zeros(()) for _ in range(32)]
        for k in range(x.shape[1]):
            lanes[k // 4 % 32] = fma(x[t, k], w[n, k], lanes[k // 4 % 32])
        lanes = [lane + 0.0 for lane in lanes]
        for half in (16, 8, 4, 2, 1):
            lanes = [lanes[u] + lanes[u + half] for u in range(half)]
        out[t, n] = lanes[0] + b[n]
    return out


def _spelled_across(g: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(g.shape[0], w.shape[1])
    for t, k in itertools.product(range(g.shape[0]), range(w.shape[1])):
        total = torch.zeros(())
        for start in range(0, g.shape[1], 64):
            chunk = torch.zeros(())
            for n in range(start, min(start + 64, g.shape[1])):
                chunk = fma(g[t, n], w[n, k], chunk)
            total = total + chunk
        out[t, k] = total
    return out


@pytest.mark.parametrize(("k", "f", "d"), [(7, 3, 2), (133, 2, 2), (260, 3, 1)])
def test_the_linear_is_the_spelled_out_order(k: int, f: int, d: int) -> None:
    w1, b1, w2, b2 = _parameters(k, f, d)
    x = _rows("x", 2, k)
    y, pre, act = registry.operator("timestep_mlp").forward(x, w1, b1, w2, b2)
    assert digest(pre) == digest(_spelled_linear(x, w1, b1))
    assert digest(act) == digest(pre / (1 + torch.exp(-pre)))
    assert digest(y) == digest(_spelled_linear(act, w2, b2))


@pytest.mark.parametrize(("n", "k"), [(1, 3), (64, 2), (65, 2), (150, 3)])
def test_the_transposed_product_is_the_spelled_out_order(n: int, k: int) -> None:
    grad, weight = _rows("grad", 2, n), inputs.parameter_tensor("mlp-test/w", (n, k), torch.float32)
    assert digest(reference.across(grad, weight)) == digest(_spelled_across(grad, weight))


def test_rows_in_parts_are_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    w1, b1, w2, b2 = _parameters(24, 70, 8)
    x, grad = _rows("x", 9, 24), _rows("grad", 9, 8)
    whole = reference.forward(x, w1, b1, w2, b2), reference.across(grad, w2)
    monkeypatch.setattr(reference, "_MOST", 5000)
    parts = reference.forward(x, w1, b1, w2, b2), reference.across(grad, w2)
    for left, right in zip((*whole[0], whole[1]), (*parts[0], parts[1]), strict=True):
        assert digest(left) == digest(right)


def test_the_gradients_of_weights_are_chains_over_rows() -> None:
    w1, b1, w2, b2 = _parameters(6, 5, 4)
    x, grad_y = _rows("x", 7, 6), _rows("grad", 7, 4)
    _, pre, act = registry.operator("timestep_mlp").forward(x, w1, b1, w2, b2)
    grad_x, grad_w1, grad_b1, grad_w2, grad_b2 = timestep_mlp_backward(grad_y, x, w1, w2, pre, act)
    s = 1 / (1 + torch.exp(-pre))
    grad_pre = _spelled_across(grad_y, w2) * (s * (1 + pre * (1 - s)))
    for grad, given, weight, bias in ((grad_y, act, grad_w2, grad_b2), (grad_pre, x, grad_w1, grad_b1)):
        assert weight is not None and bias is not None and grad_x is not None
        for n, k in itertools.product(range(grad.shape[1]), range(given.shape[1])):
            total = torch.zeros(())
            for t in range(7):
                total = fma(grad[t, n], given[t, k], total)
            assert digest(total) == digest(weight[n, k])
        assert digest(bias) == digest(fold.left_fold(grad, 0))
    assert grad_x is not None and digest(grad_x) == digest(_spelled_across(grad_pre, w1))


def test_planted_orders_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    w1, b1, *_ = _parameters(512, 40, 8)
    x, grad = _rows("x", 20, 512), _rows("grad", 20, 300)
    weight = inputs.parameter_tensor("mlp-test/w", (300, 40), torch.float32)
    honest, honest_across = reference.linear(x, w1, b1), reference.across(grad, weight)
    for name, value in (("LANES", 16), ("VECTOR", 8)):
        monkeypatch.setattr(reference, name, value)
        assert (reference.linear(x, w1, b1) != honest).float().mean() > 0.2, name
        monkeypatch.undo()
    monkeypatch.setattr(reference, "CHUNK", 32)
    assert (reference.across(grad, weight) != honest_across).float().mean() > 0.2
    monkeypatch.undo()
    monkeypatch.setattr(reference, "fma", lambda a, b, c: a * b + c)
    assert (reference.linear(x, w1, b1) != honest).float().mean() > 0.2


# --- what the model says ----------------------------------------------------------------------------------------------


def test_the_formula_is_that_of_the_model() -> None:
    w1, b1, w2, b2 = _parameters(64, 48, 24)
    x = _rows("x", 5, 64)
    inner = torch.nn.functional.silu(x.double() @ w1.double().T + b1.double())
    torch.testing.assert_close(
        timestep_mlp(x, w1, b1, w2, b2).double(), inner @ w2.double().T + b2.double(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_anything_but_fp32_is_refused(at: int, dtype: torch.dtype) -> None:
    """Probe H7: an early cast of an FP32 path."""
    given = [_rows("x", 3, 16), *_parameters(16, 12, 8)]
    given[at] = given[at].to(dtype)
    with pytest.raises(TypeError, match=r"expected torch\.float32"):
        timestep_mlp(*given)


def test_an_early_cast_would_be_seen() -> None:
    """Probe H7: what the refusal protects from is not a matter of last bits."""
    w1, b1, w2, b2 = _parameters(64, 48, 24)
    x = _rows("x", 5, 64)
    inner = torch.nn.functional.silu(x.double() @ w1.double().T + b1.double())
    exact = inner @ w2.double().T + b2.double()
    honest = (timestep_mlp(x, w1, b1, w2, b2) - exact).abs().max()
    early = (timestep_mlp(x.bfloat16().float(), w1, b1, w2, b2) - exact).abs().max()
    assert early > 50 * honest


def test_no_rows_give_gradients_of_zero() -> None:
    leaves = [t.requires_grad_() for t in (torch.zeros(0, 16), *_parameters(16, 12, 8))]
    y = timestep_mlp(*leaves)
    assert y.shape == (0, 8)
    for leaf, grad in zip(leaves, torch.autograd.grad(y, leaves, torch.zeros(0, 8)), strict=True):
        assert digest(grad) == digest(torch.zeros_like(leaf))


# --- plans ------------------------------------------------------------------------------------------------------------


def test_every_plan_covers_every_result() -> None:
    for call in calls(registry.spec("timestep_mlp"), H200, rows=(1, 3, 16, 193, 200_000)):
        k, f, d = (call.size(axis) for axis in "KFD")
        products = (
            {"second": (d, f), "pre": (f, d), "first": (f, k), "x": (k, f)} if call.backward
            else {"first": (f, k), "second": (d, f)}
        )  # fmt: skip
        for plan in plans(call):
            covered(plan, call.rows, products, H200.shared_bytes)


FORWARD_READS = {"first": ("x", "w1"), "second": ("w2",)}
BACKWARD_READS = {"second": ("grad_y", "act"), "pre": ("grad_y", "w2", "pre"), "first": ("x",), "x": ("w1",)}


@pytest.mark.parametrize("backward", [False, True])
def test_a_misaligned_input_counts_for_the_kernels_that_read_it(backward: bool) -> None:
    """D1, D4. What we allocate between two kernels is aligned; biases are read number by number."""
    spec = registry.spec("timestep_mlp")
    reads = BACKWARD_READS if backward else FORWARD_READS
    whole = next(
        call for call in calls(spec, H200, rows=(9,)) if call.backward == backward and len(call.wanted) > 2
        and [call.size(axis) for axis in "KFD"] == [256, 5376, 2688] and call.aligned
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


def test_a_far_stride_takes_the_kernel_with_64_bit_offsets() -> None:
    spec = registry.spec("timestep_mlp")
    whole = next(c for c in calls(spec, H200, rows=(4096,)) if not c.backward and c.size("F") == 5376 and c.aligned)
    for stride, streams in ((5376, {"STREAM=0", "STREAM=1"}), (2**28, {"STREAM=1"})):
        layouts = tuple(
            (name, dataclasses.replace(layout, strides=(stride, *layout.strides[1:])) if name == "x" else layout)
            for name, layout in whole.layouts
        )
        names = [plan["first"].kernel.name for plan in plans(dataclasses.replace(whole, layouts=layouts))]
        assert {part for name in names for part in name.strip("]").split(",") if part.startswith("STREAM")} == streams


def test_few_rows_stream_and_many_rows_tile() -> None:
    found = {}
    for call in calls(registry.spec("timestep_mlp"), H200, rows=(1, 4, 16, 2048)):
        if dict(call.sizes)["K"] == 256 and call.size("F") == 5376 and call.size("D") == 2688 and call.aligned:
            names = [step.kernel.name for step in plans(call)[0]]
            found[call.rows, call.backward] = names
    assert all("STREAM=1" in name for rows in (1, 4, 16) for name in found[rows, False])
    assert all("ROWS=4" in name for rows in (4, 16) for name in found[rows, False])
    assert all("STREAM=0" in name for name in found[2048, False])
    assert [name for name in found[4, True] if "fold" in name] and not [n for n in found[2048, True] if "fold" in n]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 64, 257])
def test_the_bits_at_the_size_of_the_model(rows: int) -> None:
    op = registry.operator("timestep_mlp")
    w1, b1, w2, b2 = _parameters(256, 5376, 2688, "cuda")
    x, grad = _rows("x", rows, 256, "cuda"), _rows("grad", rows, 2688, "cuda")
    forward = op.forward(x, w1, b1, w2, b2, backend="reference")
    tensors = (grad, x, w1, w2, forward[1], forward[2])
    backward = op.backward(*tensors, backend="reference")
    for index in range(8):
        with dispatch.force_plan(index):
            ours = (*op.forward(x, w1, b1, w2, b2, backend="cuda"), *op.backward(*tensors, backend="cuda"))
        for expected, got in zip((*forward, *backward), ours, strict=True):
            assert expected is not None and got is not None
            assert digest(expected) == digest(got), index


@pytest.mark.gpu
def test_very_many_rows_on_a_gpu() -> None:
    op = registry.operator("timestep_mlp")
    parameters = _parameters(16, 136, 24, "cuda")
    x, grad = _rows("x", 257, 16, "cuda"), _rows("grad", 257, 24, "cuda")
    index = torch.arange(131073, device="cuda") % 257
    small, large = op.forward(x, *parameters), op.forward(x[index], *parameters)
    only = (True, False, False, False, False)
    w1, _, w2, _ = parameters
    small_grad = op.backward(grad, x, w1, w2, small[1], small[2], wanted=only)[0]
    large_grad = op.backward(grad[index], x[index], w1, w2, large[1], large[2], wanted=only)[0]
    assert small_grad is not None and large_grad is not None
    for few, many in zip((*small, small_grad), (*large, large_grad), strict=True):
        assert digest(few[index]) == digest(many)
