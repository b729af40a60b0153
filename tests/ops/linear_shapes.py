"""What the GPU tests of ``linear`` run at the shapes of a MiniMax-H3 block."""

from __future__ import annotations

import torch
from torch import Tensor

GPU_ROWS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 264, 925, 1024, 3160, 4097, 16384)
CUBLAS = {
    "qkv": (16, 64, 264, 925, 3160),
    "o": (1, 8, 16, 64, 264, 925, 3160),
    "gate_up": (1, 8, 16, 64, 264, 925, 3160),
    "down": (264, 925, 3160),
}
"""Rows at which cuBLAS, by its own choice, was seen to have the bits of one chain."""


def positions(rows: int, count: int) -> tuple[int, ...]:
    """First, middle and last place of so many rows among all."""
    return tuple(dict.fromkeys((0, (count - rows) // 2, count - rows)))


def drawn_on_gpu(pattern: str, rows: int, outputs: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, size), weight (outputs, size) and grad_y (rows, outputs), BF16."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        value = torch.randn(*shape, generator=generator, device="cuda")
        if pattern == "wide":
            value *= torch.exp2(torch.randint(-12, 13, shape, generator=generator, device="cuda").float())
        elif pattern == "subnormal":  # products far below the smallest normal number, and their sums around it
            value *= 2.0**-66
        elif pattern == "cancelling":
            value[..., 1::2] = value[..., 0::2]
        return value.bfloat16()

    x, weight, grad = normal(rows, size), normal(outputs, size), normal(rows, outputs)
    if pattern == "cancelling":  # pairs cancel but for a rest of a few bits
        x[:, 1::2] *= -1.0078125
        grad[:, 1::2] *= -1.0078125
    return x, weight, grad
