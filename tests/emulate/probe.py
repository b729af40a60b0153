"""Small kernels of the tests' own, on the emulator."""

from __future__ import annotations

from typing import Any

from samebits.emulate.launch import Emulator
from samebits.runtime.launch import Launch
from samebits.runtime.nvrtc import CudaKernel

KERNEL = CudaKernel("h_aggregate", "probe")


def run(source: str, *args: Any, block: int = 32, grid: int = 1, shared: int = 0, descending: bool = False) -> None:
    """``source`` has a kernel named ``probe`` and may include our headers."""
    emulator = Emulator(descending, {KERNEL: source})
    emulator.launch(Launch(KERNEL, grid, block, shared), *args)


def kernel(parameters: str, body: str, before: str = "", bounds: int = 1024) -> str:
    head = (
        f'#include "vectors.cuh"\n{before}\nextern "C" __global__ void __launch_bounds__({bounds}) probe({parameters})'
    )
    return f"{head} {{\n{body}\n}}\n"
