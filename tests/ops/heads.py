"""What the tests of operators on heads share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from samebits.verify import inputs
from samebits.verify.conformance.bits import Bits

KINDS = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class HeadBits(Bits):
    """The bits, with the number of heads as the free width; subclasses hold the other axes."""

    width: ClassVar = 3
    cpu_patterns: ClassVar = ("normal", "nan")
    batch_sizes: ClassVar = ((0, 1, 7, 33, 129, 300), (0, 1, 7))
    odd_widths: ClassVar = ((1, 3, 8, 17, 56), (1, 3))
    wide_patterns: ClassVar = (("normal", "cancelling", "nan"), ("normal",))
    wide_widths: ClassVar = (57,)
    very_wide_widths: ClassVar = ((129, 1000), (65,))
    accuracy_widths: ClassVar = ((1, 17), (2,))

    def _many_values(self, metafunc: pytest.Metafunc) -> Sequence[int]:
        return (131073,)  # on a CPU 300 positions stand for them: a position has eight heads there


def rows_of(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, sample: str = "normal") -> Tensor:
    """Drawn values with zeros of both signs between them."""
    drawn = inputs.row_tensor(f"heads-test/{name}", range(shape[0]), shape[1:], dtype, sample=sample)
    drawn[..., 1::5], drawn[..., 3::5] = -0.0, 0.0
    return drawn


def fused_parts(device: str, heads: int = 3, size: int = 128) -> Iterator[Tensor]:
    """q and k (B, 7, heads, size) as diffusers cuts them from one to_qkv, for one batch and for two."""
    for batch in (1, 2):
        fused = rows_of("fused", (batch * 7, 3 * heads * size)).view(batch, 7, -1).to(device)
        for part in fused.chunk(3, dim=-1)[:2]:
            cut = part.unflatten(-1, (heads, size))
            assert not cut.is_contiguous()
            yield cut
