"""Tensors as bits. Values lie about equality (-0 == +0, NaN != NaN); integers do not."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_QUIET_NAN = {
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
}


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers of the same width and shape. Contiguous; shares memory where ``tensor`` already is."""
    return tensor.detach().contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def pattern(tensor: Tensor) -> str:
    """The bit pattern of one element as hex of the full width, e.g. ``0x3f80`` for BF16 one."""
    width = tensor.element_size()
    return f"0x{int(bits(tensor).item()) % (1 << 8 * width):0{2 * width}x}"


def canonical_nan(tensor: Tensor) -> Tensor:
    """Every NaN replaced by one quiet NaN. IEEE 754 leaves payload and sign of a computed NaN open, and machines differ."""
    if not tensor.dtype.is_floating_point:
        return tensor
    view = bits(tensor).clone()
    view[tensor.detach().contiguous().isnan()] = _QUIET_NAN[tensor.dtype]
    return view.view(tensor.dtype)


def digest(tensor: Tensor) -> str:
    """SHA-256 of the little-endian bytes in index order. Shape and dtype are not part of it."""
    array = bits(tensor).cpu().numpy()
    if sys.byteorder == "big":
        array = array.byteswap()
    return hashlib.sha256(array.tobytes()).hexdigest()
