"""Compile a translated kernel with the system's C++ compiler, and keep the shared object: by all that it follows from."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

from samebits.emulate import translate
from samebits.runtime import cubin_cache, host_compiler, nvrtc
from samebits.runtime.nvrtc import CudaKernel

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
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
_HEADERS = ("device.h", "ptx.h", "runtime.h", "tensor_core.h")


class NoCompiler(RuntimeError):
    """There is no C++ compiler; the message says which one is needed."""


class CompileError(RuntimeError):
    """A kernel is no C++ for a CPU: most often it has an instruction that ``ptx.h`` lacks, which the message names."""


@functools.cache
def compiler() -> str:
    path = host_compiler.find()
    if path is None:
        raise NoCompiler(host_compiler.lacking("kernels are emulated with"))
    return path


@functools.cache
def _folder() -> Path:
    """Objects of this compiler and of these headers on this kind of machine."""
    version = host_compiler.version(compiler()).partition("\n")[0]
    parts = [version, platform.machine(), *_OPTIONS, *_KERNEL_OPTIONS, *_RUNTIME_OPTIONS]
    key = host_compiler.digest([*parts, *(_text(name) for name in (*_HEADERS, "runtime.cpp"))])
    folder = cubin_cache.folder() / "emulate" / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _text(name: str) -> str:
    return (files("samebits.emulate") / name).read_text()


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
    return {"unit.cpp": body, name: translate.translated(text, kernel.source), **_headers(kernel.op, text)}


def _headers(op: str, source: str) -> dict[str, str]:
    """Those of our headers that the source includes, through others too: the rest may have instructions that nothing here does."""
    own, found = nvrtc.headers(op), {}
    todo = _INCLUDE.findall(source)
    while todo:
        name = todo.pop()
        if name in own and name not in found:
            found[name] = _translated(name, own[name])
            todo += _INCLUDE.findall(own[name])
    return found


@functools.lru_cache(maxsize=256)
def _translated(name: str, text: str) -> str:
    return translate.translated(text, name)


def shared_object(kernel: CudaKernel, source: str | None = None) -> Path:
    """The compiled kernel. :class:`CompileError` carries the compiler's first words."""
    return _compiled(kernel.name, unit(kernel, source), _KERNEL_OPTIONS, (str(runtime()),))


def prepare(kernels: Iterable[CudaKernel]) -> None:
    """Compile many at once, on all cores."""
    runtime()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(shared_object, dict.fromkeys(kernels)))


def _compiled(name: str, unit: dict[str, str], options: tuple[str, ...], libraries: tuple[str, ...]) -> Path:
    key = host_compiler.digest(part for pair in sorted(unit.items()) for part in pair)
    files = {header: _text(header) for header in _HEADERS} | unit
    arguments = [*_OPTIONS, *options, "-I.", "unit.cpp", *libraries]
    try:
        return host_compiler.shared_object(compiler(), _folder() / f"{key[:32]}.so", files, arguments)
    except host_compiler.RefusedError as error:
        raise CompileError(f"{name} does not compile for a CPU:\n{str(error)[:2000]}") from error
