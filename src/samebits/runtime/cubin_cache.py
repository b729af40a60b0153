"""Compiled kernels on disk. The key holds everything that can change the code; a file appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from samebits.runtime import nvrtc
from samebits.runtime.nvrtc import CudaKernel


def folder() -> Path:
    """``SAMEBITS_CACHE_DIR``, else ``samebits`` under the user's cache folder."""
    chosen = os.environ.get("SAMEBITS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samebits"


def key(kernel: CudaKernel, arch: str) -> str:
    state = hashlib.sha256()
    parts = [nvrtc.release(), kernel.source, nvrtc.source_text(kernel), *nvrtc.options(kernel, arch)]
    for name, text in nvrtc.headers(kernel.op).items():
        parts += [name, text]
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part.encode())
    return state.hexdigest()


def cubin(kernel: CudaKernel, arch: str) -> bytes:
    """Machine code from the cache, or compiled and stored. A damaged file is compiled again; a read-only cache is fine."""
    path = folder() / f"{key(kernel, arch)}.cubin"
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    digest, code = stored[:32], stored[32:]
    if code and hashlib.sha256(code).digest() == digest:
        return code
    code = nvrtc.compile_kernel(kernel, arch).cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:
        pass  # the code is in memory; only the next process pays again
    return code
