"""``qk_rmsnorm``: everything an operator must do, and the bits of ``rmsnorm`` and of torch's own norm."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from ops.heads import DEVICES, KINDS, HeadBits, fused_parts, rows_of
from torch.nn import functional as F

import samebits
from samebits import qk_rmsnorm, qk_rmsnorm_backward, rmsnorm, rmsnorm_backward
from samebits.exact.bits import digest
from samebits.verify.conformance import Conformance


class TestQkRmsnorm(HeadBits, Conformance):
    op = "qk_rmsnorm"
    held: ClassVar = {"D": 64}


class TestOddHeads(HeadBits):
    """Heads that are no whole vectors, and too wide for sixteen threads."""

    op = "qk_rmsnorm"
    held: ClassVar = {"D": 131}
    odd_widths: ClassVar = ((1, 3, 17), (2,))
    cpu_patterns: ClassVar = ("normal",)
    wide_widths: ClassVar = (5,)
    very_wide_widths: ClassVar = ((129,), (9,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 64, 100, 128, 256])
def test_the_bits_of_rmsnorm_on_rows_of_heads(size: int, device: str) -> None:
    """Forward and backward, through several tiles of 256 rows that begin inside a position."""
    for dtype in KINDS:
        x, grad = (rows_of(name, (60, 5, size), dtype).to(device) for name in ("x", "grad"))
        weight = rows_of("weight", (1, size), dtype, "weight")[0].to(device)
        rows, above = x.view(300, size), grad.view(300, size)
        y, rstd = torch.ops.samebits.qk_rmsnorm(x, weight, 1e-5, "torch", None)
        expected, kept = torch.ops.samebits.rmsnorm(rows, weight, 1e-5, "torch", None)
        assert digest(y.view(300, size)) == digest(expected) and digest(rstd.view(300)) == digest(kept)
        got = qk_rmsnorm_backward(grad, x, weight, rstd, grad_dtype=dtype)
        wanted = rmsnorm_backward(above, rows, weight, kept, grad_dtype=dtype)
        for one, other in zip(got, wanted, strict=True):
            assert one is not None and other is not None and digest(one.view(other.shape)) == digest(other)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_fused_projection_are_read_in_place(device: str) -> None:
    weight = rows_of("weight", (1, 128), sample="weight")[0].to(device)
    for part in fused_parts(device):
        with samebits.policy("strict"):
            got = qk_rmsnorm(part, weight)
        assert digest(got) == digest(rmsnorm(part.contiguous(), weight))
        with samebits.policy("strict"), pytest.raises(samebits.UnsupportedError, match="do not collapse to rows"):
            rmsnorm(part, weight)  # why this operator exists


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", [4, 64, 100, 128, 132, 256])
def test_the_bits_of_torch(size: int, dtype: torch.dtype) -> None:
    for positions in (1, 3, 777):
        x = rows_of("x", (positions, 56, size), dtype).cuda()
        weight = rows_of("weight", (1, size), dtype, "weight")[0].cuda()
        expected = F.rms_norm(x, (size,), weight, 1e-5)
        for backend in ("cuda", "reference"):
            assert digest(qk_rmsnorm(x, weight, backend=backend)) == digest(expected), (positions, backend)


def test_heads_wider_than_a_group_of_threads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x: D = 257 is outside 1 \.\. 256"):
        qk_rmsnorm(torch.zeros(2, 3, 257), torch.ones(257))
