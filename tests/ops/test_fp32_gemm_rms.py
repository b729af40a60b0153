"""``fp32_gemm_rms``: everything an operator must do, its orders and its edges. The model of the tensor core has its own tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import samebits
from samebits import fp32_gemm_rms, fp32_gemm_rms_backward, registry
from samebits.dispatch import Call, UnsupportedError
from samebits.exact.bits import bits
from samebits.ops.fp32_gemm_rms import cuda_grads, cuda_sums, reference
from samebits.runtime import sweep
from samebits.runtime.device import H200
from samebits.verify import inputs
from samebits.verify.conformance import Conformance
from samebits.verify.conformance.bits import Bits

CONTRACTS = ("ascending", "ascending-dsv4", "fast", "fast-dsv4")
GPU = pytest.mark.gpu


class TestFp32GemmRms(Conformance):
    op = "fp32_gemm_rms"
    width = 40
    held: ClassVar = {"N": 24}
    batch_sizes: ClassVar = ((0, 1, 33, 133), (0, 1, 7))
    odd_widths: ClassVar = ((17, 136), (1, 17, 136))
    wide_patterns: ClassVar = (("normal", "cancelling"), ("normal",))
    wide_widths: ClassVar = (4096,)
    very_wide_widths: ClassVar = ((4097, 16384), (4097,))

    def _contract_values(self, metafunc: pytest.Metafunc) -> list[str]:
        """The RMS forms differ in three operations of a row, so the tests of all bits take one of them; fast has its own."""
        name = metafunc.function.__name__
        if name.startswith(("test_bits", "test_compiled")):
            return ["ascending"]
        return ["ascending", "ascending-dsv4"] if hasattr(Bits, name) else list(CONTRACTS)

    def _many_values(self, metafunc: pytest.Metafunc) -> Sequence[int]:
        return (65537,)


class TestFast(Bits):
    """With few outputs and columns, because every one of them takes a model of the tensor core; that one has its own tests."""

    op = "fp32_gemm_rms"
    width = 24
    held: ClassVar = {"N": 4}
    batch_sizes: ClassVar = ((1, 257), (1, 7))
    odd_widths: ClassVar = ((17, 264), (17,))
    very_wide_widths: ClassVar = ((4097,), (1025,))
    test_bits_of_wide_rows = None  # type: ignore[assignment]
    test_very_many_rows = None  # type: ignore[assignment]

    def _contract_values(self, metafunc: pytest.Metafunc) -> list[str]:
        return ["fast"]


# --- tools ------------------------------------------------------------------------------------------------------------


def _x(rows: int, size: int, pattern: str = "normal", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return inputs.row_tensor("gemm-rms-test/x", range(rows), (size,), dtype, pattern=pattern)


def _floats(name: str, *shape: int) -> Tensor:
    return inputs.row_tensor(f"gemm-rms-test/{name}", range(shape[0]), shape[1:], torch.float32)


def _forward(x: Tensor, weight: Tensor, contract: str, backend: str | None = None) -> tuple[Tensor, ...]:
    """(proj, r, q)."""
    return registry.operator("fp32_gemm_rms").forward(x, weight, contract=contract, backend=backend)


def _gradients(
    x: Tensor, weight: Tensor, contract: str, start: Tensor | None = None, **options: Any
) -> tuple[Any, ...]:
    """(grad_x, grad_weight) for upstream gradients that belong to the rows."""
    rows, outputs = x.shape[0], weight.shape[0]
    upstream = _floats("grad_proj", rows, outputs).to(x.device), _floats("grad_r", rows, 1)[:, 0].to(x.device)
    _, r, q = _forward(x, weight, contract)
    return fp32_gemm_rms_backward(*upstream, x, weight, r, q, start, contract=contract, **options)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


# --- orders -----------------------------------------------------------------------------------------------------------


def test_ascending_in_another_language() -> None:
    """Every sum again, one NumPy number at a time: NumPy rounds each FP32 operation once, and knows no fused one."""
    x, weight = _x(3, 21), _floats("weight", 5, 21)
    grad_proj, grad_r = _floats("grad_proj", 3, 5), _floats("grad_r", 3, 1)[:, 0]
    proj, r, q = _forward(x, weight, "ascending")
    grad_x, grad_weight = _gradients(x, weight, "ascending")
    wide, w, g = x.float().numpy(), weight.numpy(), grad_proj.numpy()
    zero, size = np.float32(0), np.float32(21)
    for t in range(3):
        for n in range(5):
            total = zero
            for k in range(21):
                total = total + wide[t, k] * w[n, k]
            assert total == proj[t, n].item()
        squares = zero
        for k in range(21):
            squares = squares + wide[t, k] * wide[t, k]
        root = np.sqrt(squares) / np.float32(math.sqrt(21))
        assert root == q[t].item()
        assert np.float32(1) / (root + np.float32(1e-6)) == r[t].item()
        for k in range(21):
            leg = zero
            for n in range(5):
                leg = leg + g[t, n] * w[n, k]
            own = np.float32(r[t].item())
            rms = np.float32(grad_r[t].item()) * ((-(own * own) * wide[t, k]) / (size * root))
            assert leg + rms == grad_x[t, k].item()
    for n in range(5):
        for k in range(21):
            total = zero
            for t in range(3):
                total = total + g[t, n] * wide[t, k]
            assert total == grad_weight[n, k].item()


@pytest.mark.parametrize("size", [512, 28672])
def test_the_root_is_divided_by_the_root(size: int) -> None:
    """q = sqrt(s) / sqrt(K): not sqrt(s / K), and no product with a reciprocal; both would show at these K."""
    squares = _floats("squares", 400, 1)[:, 0].abs() * size
    r, q = reference.rms(squares, size, 1e-6, "ascending")
    s, k = squares.numpy(), np.float32(math.sqrt(size))
    expected = np.sqrt(s) / k
    assert np.array_equal(q.numpy(), expected)
    assert np.array_equal(r.numpy(), np.float32(1) / (expected + np.float32(1e-6)))
    assert (np.sqrt(s / np.float32(size)) != expected).mean() > 0.2
    assert (np.sqrt(s) * (np.float32(1) / k) != expected).mean() > 0.2


def test_the_mean_is_divided_by_the_size() -> None:
    squares = _floats("squares", 400, 1)[:, 0].abs() * 28672
    _, q = reference.rms(squares, 28672, 1e-6, "ascending-dsv4")
    assert np.array_equal(q.numpy(), squares.numpy() / np.float32(28672))
    assert (squares.numpy() * (np.float32(1) / np.float32(28672)) != q.numpy()).any()


@pytest.mark.parametrize("contract", ["ascending", "fast"])
def test_batches_continue_one_chain(contract: str) -> None:
    """Batches that start where the ones before ended have the bytes of a single batch, wherever the contract lets them be cut."""
    step = registry.spec("fp32_gemm_rms").contract(contract).chain_rows
    x, weight = _x(2 * step + 5, 8), _floats("weight", 4, 8)
    whole = _gradients(x, weight, contract)[1]
    _, r, q = _forward(x, weight, contract)
    grad_proj, grad_r = _floats("grad_proj", len(x), 4), _floats("grad_r", len(x), 1)[:, 0]

    def continued(*cuts: int) -> Tensor:
        total = None
        for first, last in zip((0, *cuts), (*cuts, len(x)), strict=True):
            part = slice(first, last)
            rows = (grad_proj[part], grad_r[part], x[part], weight, r[part], q[part])
            _, total = fp32_gemm_rms_backward(*rows, total, contract=contract, wanted=(False, True))
        assert total is not None
        return total

    assert _same(whole, continued(step, 2 * step))
    if step > 1:
        assert not _same(whole, continued(step // 2 + 3))
    else:
        assert _same(whole, continued(*range(1, len(x))))


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_padding_row_of_zeros_adds_nothing(contract: str) -> None:
    """The published formula divides by q and gives NaN there, which would then reach the gradient of the weight upstream."""
    x, weight = _x(7, 40), _floats("weight", 24, 40)
    grad_proj, grad_r = _floats("grad_proj", 7, 24), _floats("grad_r", 7, 1)[:, 0]
    padded = x.clone()
    padded[3] = 0
    proj, r, q = _forward(padded, weight, contract)
    assert (proj[3] == 0).all() and q[3] == 0 and r[3].isfinite()
    grad_x, with_leg = fp32_gemm_rms_backward(grad_proj, grad_r, padded, weight, r, q, contract=contract)
    leg = reference.backward_projection(grad_proj, weight, contract)
    assert grad_x is not None and _same(
        grad_x[3], leg[3] + 0.0
    )  # with an upstream gradient, what is left is its own leg
    grad_proj[3], grad_r[3] = 0, 0
    grad_x, grad_weight = fp32_gemm_rms_backward(grad_proj, grad_r, padded, weight, r, q, contract=contract)
    assert grad_x is not None and grad_weight is not None and with_leg is not None
    assert not bits(grad_x[3]).any() and grad_weight.isfinite().all()
    keep = torch.tensor([0, 1, 2, 4, 5, 6])
    rest = fp32_gemm_rms_backward(
        grad_proj[keep], grad_r[keep], padded[keep], weight, r[keep], q[keep], contract=contract
    )
    assert rest[0] is not None and _same(rest[0], grad_x[keep])
    if contract.startswith("ascending"):
        assert rest[1] is not None and _same(rest[1], grad_weight)


def test_fp32_rows_get_fp32_gradients() -> None:
    """Autograd rounds to the dtype of the leaf, whichever that is."""
    x, weight = _x(5, 24, dtype=torch.float32) + 2.0**-20, _floats("weight", 24, 24)
    for leaf in (x.clone().requires_grad_(), x.bfloat16().requires_grad_()):
        proj, r = fp32_gemm_rms(leaf, weight)
        (grad,) = torch.autograd.grad([proj, r], [leaf], [_floats("grad_proj", 5, 24), _floats("grad_r", 5, 1)[:, 0]])
        explicit = _gradients(leaf.detach(), weight, "ascending", grad_dtype=leaf.dtype)[0]
        assert _same(grad, explicit)


def test_streams_are_a_view() -> None:
    """(..., 4, D) is read in place as (..., 4 D), whatever lies between the tokens."""
    tokens = torch.zeros(3, 2, 6, 40, dtype=torch.bfloat16)
    tokens[:, :, 1:5] = _x(24, 40).view(3, 2, 4, 40)
    streams = tokens[:, :, 1:5]
    weight = _floats("weight", 24, 160)
    x = streams.flatten(-2)
    assert x.data_ptr() == streams.data_ptr()
    assert samebits.explain("fp32_gemm_rms", x, weight).copies == ()
    for one, other in zip(fp32_gemm_rms(x, weight), fp32_gemm_rms(x.contiguous(), weight), strict=True):
        assert _same(one, other)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", ["fast", "fast-dsv4"])
def test_fast_takes_bf16_only(contract: str) -> None:
    x, weight = _x(2, 8, dtype=torch.float32), _floats("weight", 4, 8)
    with pytest.raises(TypeError, match=f"expected torch.bfloat16 under contract '{contract}'"):
        fp32_gemm_rms(x, weight, contract=contract)
    assert fp32_gemm_rms(x, weight)[0].shape == (2, 4)


def _call(contract: str, **changed: Any) -> Call:
    found = next(c for c in sweep.calls(registry.spec("fp32_gemm_rms"), H200) if c.contract == contract)
    return dataclasses.replace(found, **changed)


def test_fast_is_refused_where_the_tensor_core_is_another() -> None:
    backend = registry.operator("fp32_gemm_rms").backend("cuda")
    blackwell = dataclasses.replace(H200, arch=100)
    for contract in CONTRACTS:
        assert backend.refuses(_call(contract)) is None
        why = backend.refuses(_call(contract, device=blackwell))
        assert (why is not None and contract in why) == contract.startswith("fast")


@GPU
def test_triton_refuses_fast() -> None:
    x, weight = _x(2, 8).cuda(), _floats("weight", 4, 8).cuda()
    with pytest.raises(UnsupportedError, match="not of 'fast'"):
        fp32_gemm_rms(x, weight, contract="fast", backend="triton")


# --- plans ------------------------------------------------------------------------------------------------------------


def test_blocks_fit_and_cover_every_chain() -> None:
    # D6
    small = dataclasses.replace(H200, arch=89, shared_bytes=99 * 1024)
    for device in (H200, small):
        for call in sweep.calls(registry.spec("fp32_gemm_rms"), device):
            if call.contract != "ascending":
                continue
            given = cuda_sums.projection(call)
            launches = [step for plan in cuda_sums.sums_plans(given) for step in plan.launches]
            for step in launches:
                sizes = dict(step.kernel.defines)
                assert isinstance(step.grid, tuple)
                if step.kernel.entry == "sums_few":
                    assert step.grid[0] == call.rows and step.grid[1] * sizes["CHAINS"] >= given.outputs + 1
                    continue
                tokens = sizes["WT"] * sizes["LT"] * sizes["R"]
                outputs = sizes["WN"] * 32 // sizes["LT"] * sizes["S"]
                assert step.grid[0] * tokens >= call.rows > (step.grid[0] - 1) * tokens
                assert step.grid[1] * outputs >= given.outputs
            weights = [step for plan in cuda_grads.grad_weight_plans(given) for step in plan.launches]
            for step in weights:
                assert isinstance(step.grid, tuple)
                assert (
                    step.grid[0] * 128 >= given.size
                    and step.grid[1] * 4 * dict(step.kernel.defines)["S"] >= given.outputs
                )
            for step in (*launches, *weights):
                assert step.shared <= device.shared_bytes - 1024 and step.block <= 512


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _backends(contract: str) -> list[str]:
    return [b.name for b in registry.spec("fp32_gemm_rms").backends if b.name != "reference" and b.keeps(contract)]


@GPU
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("outputs", [1, 4, 17, 31])
def test_every_number_of_outputs(outputs: int, contract: str) -> None:
    for size, dtype in ((136, torch.bfloat16), (33, torch.bfloat16), (40, torch.float32)):
        if dtype == torch.float32 and contract.startswith("fast"):
            continue
        x, weight = _x(37, size, dtype=dtype).cuda(), _floats("weight", outputs, size).cuda()
        expected = _forward(x, weight, contract, "reference")
        grads = _gradients(x, weight, contract, backend="reference")
        for backend in _backends(contract):
            for index in range(5):
                with samebits.dispatch.force_plan(index):
                    assert all(map(_same, expected, _forward(x, weight, contract, backend))), (backend, index, size)
                    assert all(map(_same, grads, _gradients(x, weight, contract, backend=backend))), (
                        backend,
                        index,
                        size,
                    )


@GPU
@pytest.mark.parametrize("contract", ["ascending", "fast"])
@pytest.mark.parametrize("width", [64, 33])
def test_raw_sums_of_streams_in_place(width: int, contract: str) -> None:
    """What composites use: streams with any row and stream stride, also where a stream ends inside a tile."""
    wide = torch.full((37, 6, width + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 1:5, 8:] = _x(37, 4 * width).view(37, 4, width).cuda()
    streams, weight = wide[:, 1:5, 8:], _floats("weight", 24, 4 * width).cuda()
    flat = streams.flatten(1)
    given = cuda_sums.Projection(contract, 37, 24, 4, width, "bfloat16", width == 64, width == 64, samebits_device())
    expected = _forward(flat, weight, contract, "cuda")[0]
    for plan in cuda_sums.sums_plans(given):
        parts = weight.new_full((plan.parts, 37, 25), float("nan"))
        cuda_sums.run_sums(plan, streams, weight, parts)
        sums = parts
        while len(sums) > 1:
            sums = sums[0::2] + sums[1::2]
        assert _same(sums[0, :, :24].contiguous(), expected), plan
        _, q = reference.rms(sums[0, :, 24].contiguous(), 4 * width, 1e-6, contract)
        assert _same(q, _forward(flat, weight, contract, "cuda")[2]), plan
    grad_proj, start = _floats("grad_proj", 37, 24).cuda(), _floats("start", 24, 4 * width).cuda()
    expected = reference.backward_weight(grad_proj, flat, start, contract)
    for grad_plan in cuda_grads.grad_weight_plans(given):
        out = torch.full_like(weight, float("nan"))
        cuda_grads.run_grad_weight(grad_plan, grad_proj, streams, start, out)
        assert _same(out, expected), grad_plan


def samebits_device() -> Any:
    from samebits.runtime import device

    return device.info(torch.device("cuda", torch.cuda.current_device()))
