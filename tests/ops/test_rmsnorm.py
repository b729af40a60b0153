"""``rmsnorm``: everything an operator must do, and the bits of torch's own norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import samebits
from samebits import registry, rmsnorm
from samebits.dispatch import Call, DeviceInfo
from samebits.exact.bits import digest
from samebits.ops.rmsnorm.cuda import plans
from samebits.runtime.device import H200
from samebits.runtime.sweep import dense_layout
from samebits.verify import inputs
from samebits.verify.conformance import Conformance

KINDS = (torch.bfloat16, torch.float16, torch.float32)


class TestRmsnorm(Conformance):
    op = "rmsnorm"
    cpu_patterns: ClassVar = ("normal", "nan", "minus_zero")
    batch_sizes: ClassVar = ((0, 1, 7, 33, 129, 257, 700), (0, 1, 7))
    odd_widths: ClassVar = ((1, 17, 63, 127, 129, 136, 264), (17, 136))
    wide_patterns: ClassVar = (("normal", "cancelling", "nan"), ("normal",))
    wide_widths: ClassVar = (5376,)
    very_wide_widths: ClassVar = ((2056, 4097, 5384, 7168, 16384, 131072), (4097,))
    accuracy_widths: ClassVar = ((1, 17, 136, 1000), (1, 136))


def _drawn(name: str, rows: int, size: int, dtype: torch.dtype, sample: str = "normal") -> Tensor:
    return inputs.row_tensor(f"rmsnorm-test/{name}", range(rows), (size,), dtype, sample=sample)


def test_y_is_rounded_once() -> None:
    """rstd * x first, then weight, both in FP32: neither is rounded to BF16 before the other."""
    x, weight = _drawn("x", 50, 96, torch.bfloat16), _drawn("w", 1, 96, torch.bfloat16, "weight")[0]
    y = rmsnorm(x, weight)
    rstd = torch.ops.samebits.rmsnorm(x, weight, 1e-5, "torch", None)[1][:, None]
    scaled = (x.double() * rstd.double()).float()
    once = (scaled.double() * weight.double()).float().bfloat16()
    assert digest(y) == digest(once)
    twice = (scaled.bfloat16().double() * weight.double()).float().bfloat16()
    assert (twice != once).float().mean() > 0.1  # so the difference would have been seen


def test_edge_rows() -> None:
    weight = torch.full((16,), 2.0).bfloat16()
    x = torch.stack([torch.zeros(16), torch.full((16,), -0.0), torch.full((16,), 3e38), torch.ones(16)]).bfloat16()
    y = rmsnorm(x, weight)
    assert not y[0].any() and not y[0].signbit().any()
    assert not y[1].any() and y[1].signbit().all()
    assert not y[2].any()  # the sum of squares overflows: rstd = 0, as torch does
    assert (y[3] == 2).all()


def test_the_dtypes_must_agree() -> None:
    """torch would run another, unfused norm here, with other bits."""
    with pytest.raises(TypeError, match=r"weight has dtype torch\.float32, but x has torch\.bfloat16; they must agree"):
        rmsnorm(torch.zeros(2, 8).bfloat16(), torch.ones(8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", [12, 128, 256, 1024, 4096, 5376, 7168, 16384])
def test_the_bits_of_torch(size: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, 777):
        x = _drawn("x", rows, size, dtype).cuda()
        weight = _drawn("w", 1, size, dtype, "weight")[0].cuda()
        expected = F.rms_norm(x, (size,), weight, 1e-5)
        for backend in ("cuda", "reference"):
            assert digest(rmsnorm(x, weight, backend=backend)) == digest(expected), (rows, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_bits_of_torch_on_batches_and_heads(dtype: torch.dtype) -> None:
    x = _drawn("x", 2 * 777, 5376, dtype).view(2, 777, 5376).cuda()
    weight = _drawn("w", 1, 5376, dtype, "weight")[0].cuda()
    assert digest(rmsnorm(x, weight)) == digest(F.rms_norm(x, (5376,), weight, 1e-5))
    heads = x[..., : 40 * 128].unflatten(-1, (40, 128))  # rows of a wider tensor, as norm_q and norm_k see them
    gain = weight[:128].contiguous()
    expected = F.rms_norm(heads.contiguous(), (128,), gain, 1e-5)
    with samebits.policy("silent"):
        assert digest(rmsnorm(heads, gain)) == digest(expected)


@pytest.mark.gpu
def test_every_plan_at_full_width_with_many_tiles() -> None:
    """The conformance tests take few rows at this width; here a parameter's sum has four tiles."""
    from samebits import force_plan, rmsnorm_backward

    x, grad = (_drawn(name, 1000, 5376, torch.bfloat16).cuda() for name in ("x", "grad"))
    weight = _drawn("w", 1, 5376, torch.bfloat16, "weight")[0].cuda()
    rstd = torch.ops.samebits.rmsnorm(x, weight, 1e-5, "torch", "reference")[1]
    expected = rmsnorm_backward(grad, x, weight, rstd, backend="reference")
    for plan in range(4):
        with force_plan(plan):
            got = rmsnorm_backward(grad, x, weight, rstd, backend="cuda")
        for one, other in zip(expected, got, strict=True):
            assert one is not None and other is not None and digest(one) == digest(other), plan


# --- launch plans -----------------------------------------------------------------------------------------------------


def _planned(rows: int, size: int, dtype: str = "bfloat16", device: DeviceInfo = H200) -> list[list[str]]:
    """The kernels of each plan of a whole backward of rmsnorm_modulated with nine table rows."""
    spec = registry.spec("rmsnorm_modulated")
    sizes = spec.complete({"H": size, "R": 9})
    layouts = tuple(
        (arg.name, dense_layout(arg, dtype if "float16" in arg.dtypes else arg.dtypes[0], sizes))
        for arg in spec.backward.inputs
    )
    wanted = tuple(result.name for result in spec.backward.results)
    call = Call(spec.name, True, "torch", rows, tuple(sizes.items()), layouts, wanted, "float32", device)
    found = plans(call)
    assert all(step.shared + 5 * 1024 <= device.shared_bytes for plan in found for step in plan)
    return [[step.kernel.entry for step in plan] for plan in found]


def test_many_rows_are_read_once_and_few_by_many_blocks() -> None:
    together, apart = ["backward_tile", "fold_tiles"], ["backward_x", "backward_sums", "fold_tiles"]
    for rows, first in ((1, apart), (264, apart), (4097, apart), (32768, together), (131072, together)):
        found = _planned(rows, 5376)
        assert found[0] == first and together in found and apart in found
    assert _planned(131072, 128)[0] == apart and _planned(10**7, 128)[0] == together  # one warp per block


def test_rows_that_do_not_fit_a_block_take_two_kernels() -> None:
    small = dataclasses.replace(H200, shared_bytes=99 * 1024)
    for arguments in ((131072, 5384), (131072, 5375), (131072, 5376, "float32"), (131072, 5376, "bfloat16", small)):
        assert all("backward_tile" not in plan for plan in _planned(*arguments)), arguments
    assert "backward_tile" in _planned(131072, 2048, "bfloat16", small)[0]
