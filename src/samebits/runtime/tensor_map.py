"""Tensor maps: what the copy engine of Hopper (TMA) must know of a tensor to copy boxes of it.

A map is a value of 128 bytes and a kernel parameter (``const __grid_constant__ tma::Map``, csrc/tma.cuh), so a CUDA graph keeps it
as it was at capture.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from samebits.runtime.launch import notes

KNOWN = 4096
"""Maps that are kept; making one costs more than a launch."""
_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
_SWIZZLED = 128
"""Bytes of the dense axis of a swizzled box, and of a line of it in shared memory."""


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: bool = True) -> Any:
    """Of a tensor whose last axis is dense; ``box`` in elements, in the order of its axes, 2 to 5 of them.

    Boxes with the swizzle of 128 bytes, which wgmma reads, are 128 bytes wide. ``ValueError`` where the engine cannot read the
    tensor: its base and its strides must be multiples of 16 bytes.
    """
    recorder = notes()
    if recorder is not None:
        return recorder.map(tensor, box, swizzle)
    return encoded(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), box, swizzle)


@functools.lru_cache(maxsize=KNOWN)
def encoded(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: bool,
) -> Any:
    """The map of a tensor at ``pointer``, in bytes; ``strides`` in elements."""
    import cuda.core
    from cuda.bindings import driver

    device = torch.cuda.current_device()
    cuda.core.Device(device).set_current()  # a thread of autograd may not have touched the driver yet
    check(pointer, dtype, shape, strides, box, swizzle)
    rank, size = len(shape), dtype.itemsize
    swizzles, promotions = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
    status, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype]}"),
        rank,
        pointer,
        [driver.cuuint64_t(count) for count in reversed(shape)],
        [driver.cuuint64_t(stride * size) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(count) for count in reversed(box)],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(f"the driver refused a tensor map of {shape}, strides {strides}, box {box}: {status}")
    return made


def check(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: bool,
) -> None:
    """:class:`TypeError` or :class:`ValueError` with the rule that is broken. ``pointer`` in bytes, ``strides`` in elements."""
    if dtype not in _TYPES:
        raise TypeError(f"no tensor map of {dtype}; accepted are {', '.join(map(str, _TYPES))}")
    size = dtype.itemsize
    if not 2 <= len(shape) == len(strides) == len(box) <= 5:
        raise ValueError(f"shape {shape}, strides {strides} and box {box} must have the same 2 to 5 axes")
    if strides[-1] != 1:
        raise ValueError(f"the last axis must be dense, its stride is {strides[-1]}")
    if pointer % 16 or any(stride * size % 16 for stride in strides[:-1]):
        raise ValueError(
            f"base and strides must be multiples of 16 bytes: {pointer:#x}, {strides} elements of {size} bytes"
        )
    if any(not 1 <= count <= 2**32 for count in shape) or any(not 0 < s * size < 2**40 for s in strides[:-1]):
        raise ValueError(f"shape {shape} or strides {strides} are beyond a tensor map: 2**32 and 2**40 bytes")
    if any(not 1 <= count <= 256 for count in box):
        raise ValueError(f"a box has 1 to 256 elements along each axis, not {box}")
    if swizzle and box[-1] * size != _SWIZZLED:
        raise ValueError(f"a swizzled box is {_SWIZZLED} bytes wide, not {box[-1] * size}")
    if box[-1] * size % 16:
        raise ValueError(f"the dense axis of a box must be a multiple of 16 bytes, not {box[-1] * size}")
