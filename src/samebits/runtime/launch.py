"""Launch our CUDA kernels on torch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.runtime import cubin_cache
from samebits.runtime.nvrtc import CudaKernel

DEFAULT_SHARED = 48 * 1024
"""Above this a kernel must be told that it may use more shared memory."""
KNOWN_PLANS = 8192
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""How kernels number the types of their tensors: ELEMENT of csrc/elements.cuh, and the types that they are told at run time."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch without its tensors. ``shared`` is dynamic shared memory in bytes."""

    kernel: CudaKernel
    grid: int | tuple[int, int]
    block: int
    shared: int = 0
    arguments: tuple[int, ...] = ()
    """What the planner chose and the kernel must be told, e.g. the rows of a block."""

    def __str__(self) -> str:
        return f"{self.kernel.name} grid={self.grid} block={self.block} shared={self.shared}" + (
            f" arguments={self.arguments}" if self.arguments else ""
        )


def arch_name(arch: int) -> str:
    """The NVRTC name of a compute capability: 90 is built as sm_90a, which has Hopper's own instructions."""
    return f"sm_{arch}a" if arch == 90 else f"sm_{arch}"


def launch(plan: Launch, *args: Any) -> None:
    """Enqueue on the current stream of the current device.

    Tensors are passed as pointers, ints as 64-bit integers, a ``ctypes.c_float`` as it is and a tensor map
    (:mod:`samebits.runtime.tensor_map`) by value. What a kernel is told lies in one row of words whose addresses the driver gets;
    that is less work than to let the bindings pack each argument by its type.
    """
    from cuda.bindings import driver

    ready = _prepared(plan)
    count = len(args)
    row, row_of_places = _rows(count)
    words = row()
    first = ctypes.addressof(words)
    places = row_of_places(*range(first, first + 8 * count, 8))
    for at, argument in enumerate(args):
        if isinstance(argument, Tensor):
            words[at] = argument.data_ptr()
        elif isinstance(argument, int):
            words[at] = argument
        elif isinstance(argument, ctypes.c_float):
            places[at] = ctypes.addressof(argument)
        else:
            places[at] = argument.getPtr()
    stream = _stream(torch._C._cuda_getCurrentRawStream(ready.device))
    (status,) = driver.cuLaunchKernel(
        ready.function, ready.x, ready.y, 1, ready.block, 1, 1, ready.shared, stream, ctypes.addressof(places), 0
    )
    if status != 0:
        raise RuntimeError(f"{plan} was refused: {status}")


@functools.cache
def _rows(count: int) -> tuple[Any, Any]:
    """The types of so many words and of so many addresses."""
    return ctypes.c_int64 * count, ctypes.c_void_p * count


class _Ready(NamedTuple):
    """A plan on a device, its kernel loaded."""

    plan: Launch
    device: int
    function: Any
    x: int
    y: int
    block: int
    shared: int


def _prepared(plan: Launch) -> _Ready:
    """The plan on the current device, which is current for this thread."""
    device = torch.cuda.current_device()
    if getattr(_bound, "device", None) != device:
        import cuda.core

        # A thread of torch's autograd engine may not have touched the runtime yet, and then it has no context.
        cuda.core.Device(device).set_current()
        _bound.device = device
    known = _ready.get((id(plan), device))
    if known is None:
        from cuda.bindings import driver

        kernel = _loaded(plan.kernel, device, plan.shared if plan.shared > DEFAULT_SHARED else 0)
        x, y = (plan.grid, 1) if isinstance(plan.grid, int) else plan.grid
        if len(_ready) >= KNOWN_PLANS:
            _ready.clear()
        known = _Ready(plan, device, driver.CUfunction(int(kernel.handle)), x, y, plan.block, plan.shared)
        _ready[(id(plan), device)] = known
    return known


_bound = threading.local()
_ready: dict[tuple[int, int], _Ready] = {}
"""By identity of the plan, which is looked up far faster than by its value; the entry keeps the plan alive."""


@functools.cache
def _stream(handle: int) -> Any:
    """A stream object per handle."""
    from cuda.bindings import driver

    return driver.CUstream(handle)


@functools.cache
def _loaded(kernel: CudaKernel, device: int, shared: int) -> Any:
    import cuda.core
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    code = cubin_cache.cubin(kernel, arch_name(major * 10 + minor))
    with _allowed_under_capture():
        loaded = cuda.core.ObjectCode.from_cubin(code, name=kernel.entry).get_kernel(kernel.entry)
        if shared:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(
                attribute, shared, driver.CUkernel(int(loaded.handle)), driver.CUdevice(device)
            )
            if int(status) != 0:
                raise RuntimeError(f"{kernel.name}: {shared} bytes of shared memory were refused: {status}")
    return loaded


@contextlib.contextmanager
def _allowed_under_capture() -> Iterator[None]:
    """Loading code is not a stream operation, but a capturing thread may not do it unless it says so."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, previous = driver.cuThreadExchangeStreamCaptureMode(mode)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(previous)
