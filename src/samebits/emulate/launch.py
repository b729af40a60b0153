"""Launch a kernel on the CPU: what replaces :func:`samebits.runtime.launch.launch` while kernels are emulated.

Every tensor is copied into memory of its own between pages that may not be touched, as far as its view reaches and no
further, and copied back afterwards: an access beside it ends the launch with a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samebits.emulate import build
from samebits.runtime import launch as real
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.nvrtc import CudaKernel

MOST_THREADS, MOST_GRID, MOST_GRID_Y = 1024, 2**31 - 1, 65535


class KernelFault(RuntimeError):
    """A kernel did what a GPU would not forgive, or its own check failed; the message says which thread did what."""


class _Size(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", _Size),
        ("block", _Size),
        ("dynamic_bytes", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("static_shared", ctypes.c_void_p),
        ("static_bytes", ctypes.c_size_t),
    ]


class _Parameter(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("size", ctypes.c_int)]


class _Entry(ctypes.Structure):
    _fields_ = [
        ("body", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int),
        ("most_threads", ctypes.c_int),
        ("static_begin", ctypes.c_void_p),
        ("static_end", ctypes.c_void_p),
    ]


@dataclass
class Emulator:
    """How kernels run."""

    descending: bool = False
    """Threads in descending order, and the fence before each tensor is the near one instead of the one behind it."""
    sources: dict[CudaKernel, str] = field(default_factory=dict)
    """Sources that stand in for those of the package."""

    def launch(self, plan: Launch, *args: Any) -> None:
        """As ``runtime.launch.launch``, but at once and here. Raises :class:`KernelFault`."""
        kernel = plan.kernel
        entry = _loaded(str(build.shared_object(kernel, self.sources.get(kernel))))
        grid = plan.grid if isinstance(plan.grid, tuple) else (plan.grid, 1)
        static = (entry.static_end or 0) - (entry.static_begin or 0)
        _check_limits(plan, grid, entry, static)
        _check_arguments(plan, entry, args)
        with contextlib.ExitStack() as stack:
            fences = _Fences(stack, not self.descending)
            fences.hold(args)
            values = [fences.value(a) for a in args]
            shared = fences.reserve(plan.shared, 0)
            pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
            size = _Size(plan.block, 1, 1)
            launch = _Launch(_Size(*grid, 1), size, plan.shared, self.descending, entry.static_begin, static)
            library = runtime()
            library.samebits_dynamic_shared(ctypes.c_void_p(shared))
            why, where = ctypes.c_char_p(), ctypes.c_void_p()
            body = ctypes.c_void_p(entry.body)
            if library.samebits_run(body, pointers, ctypes.byref(launch), ctypes.byref(why), ctypes.byref(where)):
                beside = fences.nearest(where.value) if where.value else ""
                raise KernelFault(f"{plan}: {(why.value or b'').decode()}{beside}")
            fences.copy_back(plan)


@contextlib.contextmanager
def emulated(emulator: Emulator) -> Iterator[Emulator]:
    """Operators' ``cuda`` modules launch here; memory that they allocate is full of NaN."""
    ours = [m for name, m in list(sys.modules.items()) if name.startswith("samebits.ops.")]
    patched = [module for module in ours if getattr(module, "launch", None) is real.launch]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # so torch fills what it allocates
    for module in patched:
        module.launch = emulator.launch  # type: ignore[attr-defined]
    try:
        yield emulator
    finally:
        torch.use_deterministic_algorithms(before)
        for module in patched:
            module.launch = real.launch  # type: ignore[attr-defined]


@functools.cache
def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build.runtime()))
    library.samebits_fenced.restype = ctypes.c_void_p
    return library


@functools.cache
def _loaded(path: str) -> _Entry:
    return _Entry.in_dll(ctypes.CDLL(path), "samebits_entry")


def _check_limits(plan: Launch, grid: tuple[int, int], entry: _Entry, static: int) -> None:
    """What a GPU refuses: more threads than the kernel was compiled for, no blocks or too many, too much shared memory."""
    most = min(entry.most_threads, MOST_THREADS)
    if not 1 <= plan.block <= most:
        raise KernelFault(f"{plan}: a block has 1 to {most} threads")
    if not (1 <= grid[0] <= MOST_GRID and 1 <= grid[1] <= MOST_GRID_Y):
        raise KernelFault(f"{plan}: a grid has 1 to {MOST_GRID} by 1 to {MOST_GRID_Y} blocks")
    if static > real.DEFAULT_SHARED or static + plan.shared > H200.shared_bytes:
        raise KernelFault(
            f"{plan}: {static} bytes of static shared memory (at most {real.DEFAULT_SHARED}) and {plan.shared} of dynamic "
            f"(together at most {H200.shared_bytes})"
        )


def _check_arguments(plan: Launch, entry: _Entry, args: tuple[Any, ...]) -> None:
    """Count and kind: a GPU would take whatever bits come."""
    if entry.count != len(args):
        raise KernelFault(f"{plan}: the kernel has {entry.count} parameters and is given {len(args)} arguments")
    for at, arg in enumerate(args):
        kind, size = entry.parameters[at].kind.decode(), entry.parameters[at].size
        if isinstance(arg, Tensor):
            fits = kind == "p"  # to what, the fences show: some kernels reinterpret what they get
        elif isinstance(arg, int):
            fits = (kind, size) == ("i", 8) or (kind == "p" and arg == 0)
        else:
            fits = kind == "f" and isinstance(arg, ctypes.c_float) and size == 4
        if not fits:
            given = f"a tensor of {arg.dtype}" if isinstance(arg, Tensor) else repr(arg)
            raise KernelFault(f"{plan}: parameter {at} is {kind}{size} and is given {given}")


@dataclass
class _Region:
    """Bytes ``first`` .. ``last`` of a storage, as far as arguments reach into it, and where they are held meanwhile."""

    arguments: list[int]
    first: int
    last: int
    at: int = 0
    beside: tuple[tuple[int, int], ...] = ()
    """Addresses and sizes of what lies between it and its fences."""

    @property
    def named(self) -> str:
        return ", ".join(map(str, self.arguments))


class _Fences:
    """The memory of one launch."""

    def __init__(self, stack: contextlib.ExitStack, at_end: bool) -> None:
        self._stack, self._at_end = stack, at_end
        self._regions: dict[int, _Region] = {}

    def hold(self, args: tuple[Any, ...]) -> None:
        """Copy what the tensors reach. Tensors of one storage stay together, so that they may overlap."""
        for number, arg in enumerate(args):
            if isinstance(arg, Tensor):
                first, last = _reach(arg)
                region = self._regions.setdefault(arg.untyped_storage().data_ptr(), _Region([], first, last))
                region.arguments.append(number)
                region.first, region.last = min(region.first, first), max(region.last, last)
        for region in self._regions.values():
            size = region.last - region.first
            region.at = self.reserve(size, region.first % 16)
            region.beside = _beside(region.at, size)
            ctypes.memmove(region.at, region.first, size)

    def reserve(self, size: int, remainder: int) -> int:
        """The address of ``size`` bytes of NaN between the fences, equal to ``remainder`` modulo 16."""
        base, reserved = ctypes.c_void_p(), ctypes.c_size_t()
        end = ctypes.c_int(self._at_end)
        address = runtime().samebits_fenced(
            ctypes.c_size_t(size), end, ctypes.c_uint(remainder), ctypes.byref(base), ctypes.byref(reserved)
        )
        if not address:
            raise MemoryError("no room for a fence around a tensor")
        self._stack.callback(runtime().samebits_release, base, reserved)
        return int(address)

    def value(self, arg: Any) -> Any:
        """An argument as the kernel takes it."""
        if isinstance(arg, Tensor):
            region = self._regions[arg.untyped_storage().data_ptr()]
            return ctypes.c_void_p(region.at + arg.data_ptr() - region.first)
        return ctypes.c_longlong(arg) if isinstance(arg, int) else arg

    def copy_back(self, plan: Launch) -> None:
        for region in self._regions.values():
            for at, size in region.beside:
                if ctypes.string_at(at, size).strip(b"\xff"):
                    raise KernelFault(
                        f"{plan}: wrote beside the {region.last - region.first} bytes of parameter {region.named}"
                    )
            ctypes.memmove(region.first, region.at, region.last - region.first)

    def nearest(self, address: int) -> str:
        """Where an address lies, in words."""
        found = []
        for region in self._regions.values():
            size = region.last - region.first
            beyond = address - region.at - size if address >= region.at else address - region.at
            found.append((abs(beyond), f", {beyond:+} bytes from the {size} bytes of parameter {region.named}"))
        return min(found)[1] if found else ""


def _beside(address: int, size: int) -> tuple[tuple[int, int], ...]:
    """From the first page of a region to the region, and from the region to the end of its last page."""
    before, behind = address % mmap.PAGESIZE, -(address + size) % mmap.PAGESIZE
    return (address - before, before), (address + size, behind)


def _reach(tensor: Tensor) -> tuple[int, int]:
    """First byte of a view, and the one behind its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size()
