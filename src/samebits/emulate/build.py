"""Compile a translated kernel with the system's C++ compiler, and keep the shared object: by all that it follows from."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

from samebits.emulate import translate
from samebits.runtime import cubin_cache, nvrtc
from samebits.runtime.nvrtc import CudaKernel

COMPILER = "g++"
_OPTIONS = ("-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-U_FORTIFY_SOURCE")
_KERNEL_OPTIONS = (
    "-O1",
    "-w",  # the compiler of the GPU is the one whose warnings count
    "-fno-gnu-unique",
    "-Wl,-Bsymbolic",
    "-fsanitize=bounds-strict,alignment,shift,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
)
_RUNTIME_OPTIONS = ("-O2", "-Wall", "-Wextra", "-Werror")
_HEADERS = ("device.h", "ptx.h", "runtime.h", "tensor_core.h")


class NoCompiler(RuntimeError):
    """There is no C++ compiler; the message says which one is needed."""


class CompileError(RuntimeError):
    """A kernel is no C++ for a CPU: most often it has an instruction that ``ptx.h`` lacks, which the message names."""


@functools.cache
def compiler() -> str:
    path = shutil.which(COMPILER)
    if path is None:
        raise NoCompiler(f"kernels are emulated with {COMPILER} (tried: GCC 12), which is not installed")
    return path


@functools.cache
def _folder() -> Path:
    """Objects of this compiler and of these headers on this kind of machine."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[
        0
    ]
    parts = [version, platform.machine(), *_OPTIONS, *_KERNEL_OPTIONS, *_RUNTIME_OPTIONS]
    key = _digest([*parts, *(_text(name) for name in (*_HEADERS, "runtime.cpp"))])
    folder = cubin_cache.folder() / "emulate" / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _text(name: str) -> str:
    return (files("samebits.emulate") / name).read_text()


def _digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part.encode())
    return state.hexdigest()


@functools.cache
def runtime() -> Path:
    """The shared object that runs the threads of a block."""
    return _compiled("runtime.cpp", {"unit.cpp": _text("runtime.cpp")}, _RUNTIME_OPTIONS, ())


def unit(kernel: CudaKernel, source: str | None = None) -> dict[str, str]:
    """What is compiled, as files. ``source`` stands in for the kernel's own."""
    text = nvrtc.source_text(kernel) if source is None else source
    name = f"{kernel.entry}.cu"
    defines = "".join(f"#define {key} {value}\n" for key, value in kernel.defines)
    entry = f"SAMEBITS_ENTRY({kernel.entry}, {translate.most_threads(text, kernel.source)});\n"
    # Internal linkage for all of it: else variables in shared memory would be merged with others of their names.
    body = f'#include "device.h"\n{defines}namespace {{\n#include "{name}"\n}}\n{entry}'
    return {"unit.cpp": body, name: translate.translated(text, kernel.source), **_headers(kernel.op)}


@functools.cache
def _headers(op: str) -> dict[str, str]:
    return {name: translate.translated(text, name) for name, text in nvrtc.headers(op).items()}


def shared_object(kernel: CudaKernel, source: str | None = None) -> Path:
    """The compiled kernel. :class:`CompileError` carries the compiler's first words."""
    return _compiled(kernel.name, unit(kernel, source), _KERNEL_OPTIONS, (str(runtime()),))


def prepare(kernels: Iterable[CudaKernel]) -> None:
    """Compile many at once, on all cores."""
    runtime()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(shared_object, dict.fromkeys(kernels)))


def _compiled(name: str, unit: dict[str, str], options: tuple[str, ...], libraries: tuple[str, ...]) -> Path:
    folder = _folder()
    target = folder / f"{_digest(part for pair in sorted(unit.items()) for part in pair)[:32]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for file, text in ({header: _text(header) for header in _HEADERS} | unit).items():
            (Path(scratch) / file).write_text(text)
        command = [compiler(), *_OPTIONS, *options, "-I.", "unit.cpp", "-o", "unit.so", *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch)
        if done.returncode != 0:
            raise CompileError(f"{name} does not compile for a CPU:\n{done.stderr[:2000]}")
        os.replace(Path(scratch) / "unit.so", target)
    return target
