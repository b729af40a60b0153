"""Launch our CUDA kernels on torch's current stream."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """Enqueue on the current stream of the current device. Tensors are passed as pointers, ints as 64-bit integers."""
    import cuda.core

    config, kernel, stream = _prepared(plan)
    cuda.core.launch(stream, config, kernel, *[a.data_ptr() if isinstance(a, Tensor) else a for a in args])


def launch_with_maps(plan: Launch, *args: Any) -> None:
    """As :func:`launch`, where an argument may also be a tensor map (:mod:`samebits.runtime.tensor_map`), passed by value."""
    import ctypes

    from cuda.bindings import driver

    _, kernel, stream = _prepared(plan)
    values, types = [], []
    for argument in args:
        if isinstance(argument, Tensor):
            argument = argument.data_ptr()
        values.append(argument)
        types.append(ctypes.c_int64 if isinstance(argument, int) else None)
    x, y = (plan.grid, 1) if isinstance(plan.grid, int) else plan.grid
    (status,) = driver.cuLaunchKernel(
        driver.CUfunction(int(kernel.handle)), x, y, 1, plan.block, 1, 1, plan.shared, driver.CUstream(int(stream.handle)),
        (tuple(values), tuple(types)), 0,
    )  # fmt: skip
    if int(status) != 0:
        raise RuntimeError(f"{plan} was refused: {status}")


def _prepared(plan: Launch) -> tuple[Any, Any, Any]:
    """Configuration and loaded kernel of a plan, and the current stream, on the current device."""
    import cuda.core

    device = torch.cuda.current_device()
    if getattr(_bound, "device", None) != device:
        # A thread of torch's autograd engine may not have touched the runtime yet, and then it has no context.
        cuda.core.Device(device).set_current()
        _bound.device = device
    known = _ready.get((id(plan), device))
    if known is None:
        config = cuda.core.LaunchConfig(grid=plan.grid, block=plan.block, shmem_size=plan.shared)
        kernel = _loaded(plan.kernel, device, plan.shared if plan.shared > DEFAULT_SHARED else 0)
        if len(_ready) >= KNOWN_PLANS:
            _ready.clear()
        known = _ready[(id(plan), device)] = (plan, config, kernel)
    _, config, kernel = known
    return config, kernel, _stream(torch._C._cuda_getCurrentRawStream(device))


_bound = threading.local()
_ready: dict[tuple[int, int], tuple[Launch, Any, Any]] = {}
"""By identity of the plan, which is looked up far faster than by its value; the entry keeps the plan alive."""


@functools.cache
def _stream(handle: int) -> Any:
    """A stream object per handle: making one costs more than a launch."""
    import cuda.core

    if handle == 0:
        return cuda.core.LEGACY_DEFAULT_STREAM
    return cuda.core.Stream.from_handle(handle)


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
