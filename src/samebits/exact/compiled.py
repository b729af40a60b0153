"""The tensor-core chain on a CPU in compiled code: the bits of :mod:`samebits.exact.tensor_core`, hundreds of times as fast.

``tensor_core.cpp`` is compiled with the system's C++ compiler at first use, for the processor it runs on, and kept in the cache
folder. It is no extension module and no dependency: Triton needs a C compiler on the same machines, a compiled package such as
numba would bind the versions of NumPy and Python, and where there is no compiler the definition gives the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
_SOURCES = {"tensor_core.cpp": "samebits.exact", "tensor_core.h": "samebits.emulate"}
_ENTRIES = {torch.bfloat16: "chain_bfloat16", torch.float16: "chain_float16"}
_PART = 64
"""Outputs of a row that a thread takes at a time: whole vectors."""
_SMALL = 1 << 16
"""Below so many products one thread does it all."""


class Unavailable(RuntimeError):
    """There is no compiled chain here; the message says why."""


@functools.cache
def missing() -> str | None:
    """Why there is no compiled chain here, or None. The first question compiles it (seconds, once per machine)."""
    try:
        _library()
    except Unavailable as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(_shared_object()))
    except OSError as error:
        raise Unavailable(f"the compiled chain cannot be stored or loaded: {error}") from error
    for entry in _ENTRIES.values():
        function = getattr(library, entry)
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_longlong] * 5
        function.restype = None
    return library


def _shared_object() -> Path:
    from samebits.runtime import cubin_cache, host_compiler

    path = host_compiler.find()
    if path is None:
        raise Unavailable(host_compiler.lacking("the compiled chain needs"))
    texts = {name: (files(package) / name).read_text() for name, package in _SOURCES.items()}
    key = host_compiler.digest([*texts.values(), *OPTIONS, host_compiler.version(path), _processor()])
    target = cubin_cache.folder() / "exact" / f"{key[:32]}.so"
    try:
        return host_compiler.shared_object(path, target, texts, [*OPTIONS, "tensor_core.cpp"])
    except host_compiler.RefusedError as error:
        raise Unavailable(f"the compiled chain does not compile: {str(error)[:500]}") from error


def _processor() -> str:
    """What ``-march=native`` looks at: a cache folder may be shared by machines that differ in it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))
    return platform.processor()


def chain(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out (M, N) FP32 = out + a (M, K) b (N, K)^T, all contiguous and on a CPU, a and b both BF16 or both FP16.

    Raises :class:`Unavailable` where :func:`missing` says so.
    """
    function = getattr(_library(), _ENTRIES[a.dtype])
    (m, k), n = a.shape, b.shape[0]

    def part(first: int, last: int) -> None:
        function(out.data_ptr(), a.data_ptr(), b.data_ptr(), m, n, k, first, last)

    threads = torch.get_num_threads()
    if threads == 1 or n <= _PART or m * n * k < _SMALL:
        part(0, n)
        return
    with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of the interpreter's lock
        list(pool.map(lambda first: part(first, min(first + _PART, n)), range(0, n, _PART)))
