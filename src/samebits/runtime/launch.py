"""Launch our CUDA kernels on torch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from samebits.runtime import cubin_cache
from samebits.runtime.device import current_device
from samebits.runtime.nvrtc import CudaKernel

DEFAULT_SHARED = 48 * 1024
"""Static and dynamic shared memory together; above this a kernel must be told that it may use more."""
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
    if _thread.recorder is not None:
        _thread.recorder.launch(plan, args)
        return
    device = bound_device()
    count = len(args)
    rows = _thread.rows
    row = rows.pop(count, None) or _Row(count)  # taken, so that nothing that interrupts this call writes into it
    words, places = row.words, row.places
    by_address: tuple[int, ...] = ()
    for at, argument in enumerate(args):
        kind = type(argument)
        if kind is int:
            words[at] = argument
        elif kind is Tensor or isinstance(argument, Tensor):
            words[at] = argument.data_ptr()
        elif isinstance(argument, int):
            words[at] = argument
        else:
            by_address += (at,)
            places[at] = ctypes.addressof(argument) if kind is ctypes.c_float else argument.getPtr()
    try:
        enqueue(((ready(plan, device), row.address),), device)
    finally:
        for at in by_address:
            places[at] = row.first + 8 * at
        rows[count] = row


def enqueue(launches: Iterable[tuple[_Ready, int]], device: int) -> None:
    """Launches on the current stream of a device that is bound, each with the address of the addresses of its words."""
    launch_kernel = _driver().cuLaunchKernel
    stream = _stream(torch._C._cuda_getCurrentRawStream(device))
    for (plan, function, x, y, block, shared), row in launches:
        (status,) = launch_kernel(function, x, y, 1, block, 1, 1, shared, stream, row, 0)
        if status != 0:
            raise RuntimeError(f"{plan} was refused: {status}")


def bound_device() -> int:
    """The current device, whose context this thread has."""
    device = current_device()
    if _thread.device != device:
        _bind(device)
    return device


def ready(plan: Launch, device: int) -> _Ready:
    """The plan with its kernel loaded, on a device that is bound."""
    return _ready.get((id(plan), device)) or _load(plan, device)


class Notes(Protocol):
    """Takes down what would be launched (:mod:`samebits.runtime.program`)."""

    def launch(self, plan: Launch, arguments: Sequence[Any]) -> None: ...

    def map(self, tensor: Tensor, box: tuple[int, ...], swizzle: bool) -> Any: ...


@contextlib.contextmanager
def noting(recorder: Notes) -> Iterator[None]:
    """Until it ends, what this thread would launch goes into the notes and nowhere else."""
    before, _thread.recorder = _thread.recorder, recorder
    try:
        yield
    finally:
        _thread.recorder = before


def notes() -> Notes | None:
    """Of this thread, while it is :func:`noting`."""
    return _thread.recorder


class _Row:
    """So many words, and their addresses, as the driver takes them."""

    __slots__ = ("address", "first", "places", "words")

    def __init__(self, count: int) -> None:
        self.words = (ctypes.c_int64 * count)()
        self.first = ctypes.addressof(self.words)
        self.places = (ctypes.c_void_p * count)(*range(self.first, self.first + 8 * count, 8))
        self.address = ctypes.addressof(self.places)


class _Thread(threading.local):
    """What a thread has: the device whose context it has bound, a row for each number of arguments, who takes notes."""

    def __init__(self) -> None:
        self.device = -1
        self.recorder: Notes | None = None
        self.rows: dict[int, _Row] = {}


class _Ready(NamedTuple):
    """A plan on a device, its kernel loaded."""

    plan: Launch
    function: Any
    x: int
    y: int
    block: int
    shared: int


def _bind(device: int) -> None:
    """A thread of torch's autograd engine may not have touched the runtime yet, and then it has no context."""
    import cuda.core

    cuda.core.Device(device).set_current()
    _thread.device = device


def _load(plan: Launch, device: int) -> _Ready:
    """The plan on the current device, which is current for this thread."""
    kernel = _loaded(plan.kernel, device)
    _allow(plan, device, _driver().CUkernel(int(kernel.handle)))
    x, y = (plan.grid, 1) if isinstance(plan.grid, int) else plan.grid
    if len(_ready) >= KNOWN_PLANS:
        _ready.clear()
    made = _Ready(plan, _driver().CUfunction(int(kernel.handle)), x, y, plan.block, plan.shared)
    _ready[(id(plan), device)] = made
    return made


_thread = _Thread()
_ready: dict[tuple[int, int], _Ready] = {}
"""By identity of the plan, which is looked up far faster than by its value; the entry keeps the plan alive."""


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@functools.cache
def _stream(handle: int) -> Any:
    """A stream object per handle."""
    return _driver().CUstream(handle)


@functools.cache
def _loaded(kernel: CudaKernel, device: int) -> Any:
    import cuda.core

    major, minor = torch.cuda.get_device_capability(device)
    code = cubin_cache.cubin(kernel, arch_name(major * 10 + minor))
    with _allowed_under_capture():
        return cuda.core.ObjectCode.from_cubin(code, name=kernel.entry).get_kernel(kernel.entry)


_most_shared: dict[tuple[CudaKernel, int], int] = {}
"""The most dynamic shared memory that a plan of a kernel has asked for on a device."""


def _allow(plan: Launch, device: int, kernel: Any) -> None:
    """Let the kernel have the dynamic shared memory of the plan, if no plan before has asked for as much."""
    key = plan.kernel, device
    if plan.shared <= _most_shared.get(key, 0):
        return
    driver = _driver()
    attributes, place = driver.CUfunction_attribute, driver.CUdevice(device)
    status, static = driver.cuKernelGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, place)
    if status == 0 and static + plan.shared > DEFAULT_SHARED:
        most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with _allowed_under_capture():
            (status,) = driver.cuKernelSetAttribute(most, plan.shared, kernel, place)
    if status != 0:
        raise RuntimeError(f"{plan.kernel.name}: {plan.shared} bytes of shared memory were refused: {status}")
    _most_shared[key] = plan.shared


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
