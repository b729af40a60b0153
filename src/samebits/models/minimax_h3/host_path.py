"""What a patched block costs the host, on any machine: CPU tensors take the CUDA backends, and the driver does nothing.

    python -m samebits.models.minimax_h3.host_path

Without a graph short sequences are bound by the host. Its time depends on the machine and on who else works there; what it does
can be counted, and is the same each time. A reduced block has as many calls as the released one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import samebits
from samebits import registry
from samebits.models.minimax_h3 import block_bench
from samebits.models.minimax_h3.geometry import MODALITIES, Geometry
from samebits.ops.linear import grouped
from samebits.runtime import device as devices
from samebits.runtime import launch as launching
from samebits.runtime import program
from samebits.runtime import tensor_map as mapping
from samebits.runtime.launch import Launch
from samebits.sequence_ops.attention import op as attention
from samebits.sequence_ops.attention import triton_backward

SMALL = Geometry(64, time_hidden=64, time_embed=64, heads=2, ffn_dim=64)
_OURS = str(Path(samebits.__file__).parent)
_VIEWS = frozenset({"view", "chunk", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "as_strided", "detach"})
_ALLOCATING = frozenset({"new_empty", "empty", "empty_strided", "empty_like", "new_zeros", "zeros"})


class _Driver:
    """Takes launches and does nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def cuLaunchKernel(self, *given: Any) -> tuple[int]:
        self.launches += 1
        return (0,)


class _Map:
    def __init__(self) -> None:
        self._held = (ctypes.c_int64 * 16)()

    def getPtr(self) -> int:
        return ctypes.addressof(self._held)


@contextlib.contextmanager
def no_device() -> Iterator[_Driver]:
    """Until it ends, calls on CPU tensors are planned and prepared as on an H200. Their results have no values.

    Nothing that was decided meanwhile is remembered afterwards.
    """
    driver, same_map = _Driver(), _Map()

    def load(plan: Launch, device: int) -> launching._Ready:
        x, y = (plan.grid, 1) if isinstance(plan.grid, int) else plan.grid
        made = launching._Ready(plan, None, x, y, plan.block, plan.shared)
        launching._ready[(id(plan), device)] = made
        return made

    replaced: list[tuple[Any, str, Any]] = [
        (devices, "info", lambda device: devices.H200),
        (devices, "missing", lambda backend: None),
        (devices, "current_device", lambda: 0),
        (launching, "current_device", lambda: 0),
        (launching, "_bind", lambda device: None),
        (launching, "_driver", lambda: driver),
        (launching, "_stream", lambda handle: handle),
        (launching, "_load", load),
        (launching, "_ready", {}),
        (mapping, "encoded", lambda *of: same_map),
        # Which addresses come again is the allocator's affair, and must not be seen in what is counted.
        (program, "_encoded", lambda one, address: (same_map.getPtr(), same_map)),
        (triton_backward, "launch", lambda *given, **options: driver.cuLaunchKernel()),
        (grouped, "_known", {}),
        (attention, "_known", {}),
        *((registry.operator(name), "_decisions", {}) for name in registry.names()),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        yield driver


@dataclass(frozen=True)
class Counts:
    """What one call does on the host, once everything about it is known."""

    functions: int
    """Calls of Python functions of this package."""
    builtins: int
    """Calls of functions that are not written in Python, by them."""
    views: int
    """Of these, the ones that make a view."""
    allocations: int
    launches: int


def counted(call: Callable[[], Any], driver: _Driver) -> Counts:
    for _ in range(3):
        call()
    found: Counter[str] = Counter()
    names: Counter[str] = Counter()
    before = driver.launches

    def see(frame: Any, event: str, what: Any) -> None:
        if frame.f_code.co_filename.startswith(_OURS) and frame.f_code.co_filename != __file__:
            found[event] += 1
            if event == "c_call":
                names[what.__name__] += 1

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    views = sum(count for name, count in names.items() if name in _VIEWS)
    allocations = sum(count for name, count in names.items() if name in _ALLOCATING)
    return Counts(found["call"], found["c_call"], views, allocations, driver.launches - before)


def calls(seq_len: int = 264) -> dict[str, Callable[[], Any]]:
    """By direction, the calls that :mod:`samebits.models.minimax_h3.block_bench` times."""
    given = block_bench.subject(seq_len, SMALL, torch.device("cpu"))
    shared = samebits.segments(given.index, MODALITIES * block_bench.TIMESTEPS)
    return {
        direction: block_bench.timed(block_bench.OURS, given, given.ours, shared, direction).prepare()
        for direction in block_bench.DIRECTIONS
    }


def least_us(call: Callable[[], Any], rounds: int = 20, count: int = 30) -> float:
    """Of the processor's time, the least of some rounds."""
    gc.collect()
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(count):
            call()
        times.append((time.thread_time() - started) * 1e6 / count)
    return min(times)


def main() -> int:
    torch.set_num_threads(1)
    with no_device() as driver:
        for direction, call in calls().items():
            print(f"{direction}: {counted(call, driver)}, {least_us(call):.0f} us of this processor")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
