"""Compile our CUDA C++ to machine code with NVRTC: always a cubin for one architecture, never PTX at run time.

The options are fixed here and read nothing from the environment, so relaxed arithmetic cannot be switched on from
outside: no fast-math, no contraction, no flush-to-zero, IEEE division and square root.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "-default-device")
_APPENDED = ("NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS")
"""Variables through which NVRTC could take options that we do not see."""
_EXACT = frozenset(OPTIONS)
_HARMLESS = re.compile(r"-arch=sm_\d+[af]?|-D[A-Za-z_]\w*=-?\d+")
_RELAXED = ("fast-math", "fmad=true", "ftz=true", "prec-div=false", "prec-sqrt=false", "fast_math")


@dataclass(frozen=True)
class CudaKernel:
    """One ``extern "C"`` kernel, with the macros that fix its compile-time choices.

    It is the only kernel of the file ``<entry>.cu`` in the operator's folder. Every value that changes the code is in
    ``defines``, so the key of the compiled code holds it.
    """

    op: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def source(self) -> str:
        """Path inside the package."""
        return f"{folder(self.op)}/{self.entry}.cu"

    @property
    def name(self) -> str:
        macros = ",".join(f"{key}={value}" for key, value in self.defines)
        return f"{self.entry}[{macros}]" if macros else self.entry


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message carries its log."""


def options(kernel: CudaKernel, arch: str) -> tuple[str, ...]:
    """The complete option list of one build."""
    chosen = (*OPTIONS, f"-arch={arch}", *(f"-D{key}={value}" for key, value in kernel.defines))
    refuse_relaxed(chosen)
    return chosen


def refuse_relaxed(chosen: tuple[str, ...]) -> None:
    """Only what is known to keep the arithmetic passes: another spelling, another value or an options file is no exception."""
    for option in chosen:
        if any(word in option for word in _RELAXED):
            raise ValueError(
                f"option {option!r} relaxes the arithmetic; samebits kernels are only built with exact options"
            )
        if option not in _EXACT and not _HARMLESS.fullmatch(option):
            raise ValueError(
                f"option {option!r} is none that samebits kernels are built with, so it might relax the arithmetic"
            )


@functools.cache
def version() -> str:
    """The NVRTC version, e.g. ``13.0``."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    _check(status, "nvrtcVersion")
    return f"{major}.{minor}"


@functools.cache
def release() -> str:
    """The version, with that of the package it came in where there is one: patch releases may differ in code."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return f"{version()} ({package} {importlib.metadata.version(package)})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return version()


HOMES = ("ops", "sequence_ops")
"""Where operators are: those that a declaration describes, and those of sequences."""


@functools.cache
def folder(op: str) -> str:
    """The operator's folder inside the package."""
    return next((f"{home}/{op}" for home in HOMES if (files("samebits") / home / op).is_dir()), f"{HOMES[0]}/{op}")


@functools.cache
def headers(op: str) -> dict[str, str]:
    """Our ``.cuh`` files by name, general ones and the operator's own: everything its kernels may include."""
    folders = (files("samebits") / "csrc", files("samebits") / folder(op))
    found = [f for folder in folders for f in folder.iterdir() if f.name.endswith(".cuh")]
    return {f.name: f.read_text() for f in sorted(found, key=lambda f: f.name)}


def source_text(kernel: CudaKernel) -> str:
    return (files("samebits") / kernel.source).read_text()


@dataclass(frozen=True)
class Built:
    """One kernel for one architecture. The PTX is what the machine code was made from; it is read, never run."""

    cubin: bytes
    ptx: str


def compile_kernel(kernel: CudaKernel, arch: str) -> Built:
    """Compile for ``arch``, e.g. ``sm_90a``. :class:`CompileError` carries NVRTC's log."""
    from cuda.bindings import nvrtc

    for variable in _APPENDED:
        if os.environ.get(variable):
            raise CompileError(f"{variable} is set and could relax the arithmetic of {kernel.name}; unset it")
    own = headers(kernel.op)
    status, program = nvrtc.nvrtcCreateProgram(
        source_text(kernel).encode(),
        kernel.source.encode(),
        len(own),
        [text.encode() for text in own.values()],
        [name.encode() for name in own],
    )
    _check(status, "nvrtcCreateProgram")
    try:
        chosen = [o.encode() for o in options(kernel, arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(chosen), chosen)
        if int(status) != 0:
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
            raise CompileError(f"{kernel.name} does not compile for {arch}:\n{log.rstrip(chr(0)).rstrip()}")
        return Built(
            _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0").decode(),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: object, size_of: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    status, size = size_of(program)
    _check(status, size_of.__name__)
    buffer = b" " * size
    (status,) = get(program, buffer)
    _check(status, get.__name__)
    return buffer


def _check(status: object, what: str) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise CompileError(f"NVRTC failed in {what}: {status}")
