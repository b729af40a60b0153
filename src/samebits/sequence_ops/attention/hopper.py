"""What the Hopper kernels need of a call: tensors that the copy engine can read, as boxes, and numbers as words."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from samebits.runtime.tensor_map import tensor_map
from samebits.sequence_ops.attention.checks import Problem

ARCH = 90
"""wgmma is Hopper's own: what comes after it has other instructions."""
FEW_QUERIES = 64
"""Up to these, of a sequence, most tiles of the kernels would mostly be empty: the forward has another for them."""
LINE = 64
"""Elements of a line of a box: 128 bytes."""


def unsuited(arch: int, *tensors: Tensor) -> str | None:
    """Why the kernels cannot take this call, whatever the strides of its tensors (B, S, H, D), or None."""
    if arch != ARCH:
        return f"its instructions are those of compute capability {ARCH / 10}"
    return "there is nothing to read" if any(tensor.numel() == 0 for tensor in tensors) else None


def unreadable(*tensors: Tensor) -> str | None:
    """Why the copy engine cannot read these tensors, or None."""
    for tensor in tensors:
        strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1]
        if tensor.data_ptr() % 16 or any(stride * tensor.element_size() % 16 for stride in strides):
            return "the copy engine reads rows that start at multiples of 16 bytes"
        if any(not 0 < stride * tensor.element_size() < 2**40 for stride in strides):
            return "the copy engine reads no expanded axis, and none with a stride of 2^40 bytes"
    return None


def boxes(tensor: Tensor, rows: int) -> Any:
    """A tensor map of boxes of ``rows`` positions of one head, as lines of 64 elements; those of a row are ``rows`` lines apart."""
    batch, length, heads, head_dim = tensor.shape
    steps = [stride if size > 1 else LINE for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    lines = head_dim // LINE
    view = torch.as_strided(tensor, (batch, heads, lines, length, LINE), (steps[0], steps[2], LINE, steps[1], 1))
    return tensor_map(view, (1, 1, lines, rows, LINE))


def boxes_of_heads(tensor: Tensor, rows: int, count: int) -> Any:
    """A tensor map of boxes of ``rows`` positions of ``count`` heads, those of a position together, a line of 64 elements each."""
    batch, length, heads, head_dim = tensor.shape
    steps = [stride if size > 1 else LINE for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    view = torch.as_strided(
        tensor, (batch, head_dim // LINE, length, heads, LINE), (steps[0], LINE, steps[1], steps[2], 1)
    )
    return tensor_map(view, (1, 1, rows, count, LINE))


def bounds_of(problem: Problem, cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[Any, Any]:
    """Of the queries' and the keys' documents: what the kernels follow, or nothing where each batch entry is a sequence."""
    if not problem.packed:
        return 0, 0
    return cu_q, cu_q if cu_k is None else cu_k


def word(value: float) -> int:
    """The bits of an FP32 number: an argument of the backward's kernels."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


def wide_word(value: float) -> int:
    """The bits of an FP64 number: an argument of the forward's kernel, in the place of a double."""
    return int(struct.unpack("q", struct.pack("d", value))[0])
