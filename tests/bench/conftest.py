"""A machine without a GPU in the place of the real one: host clock, no graphs, the same interface."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from samebits import environment
from samebits.bench.timing import Failure, Sample
from samebits.bench.work import LeftOut, Work


class HostMachine:
    device = torch.device("cpu")
    copy_gbps = 10.0
    launch_floor_us = 2.5

    def __init__(self, free: int = 1 << 34) -> None:
        self.free = free
        self.names: list[str] = []

    def free_bytes(self) -> int:
        return self.free

    def release(self) -> None:
        pass

    def measure(self, works: Sequence[Work]) -> dict[str, Sample | Failure]:
        found: dict[str, Sample | Failure] = {}
        for work in works:
            self.names.append(work.name)
            try:
                run = work.prepare()
                run()
                started = time.perf_counter()
                outputs = run()
                us = (time.perf_counter() - started) * 1e6
            except LeftOut as error:
                found[work.name] = Failure(str(error))
                continue
            found[work.name] = Sample(us, us, us, 1, "graph", us, 0, tuple(outputs) if work.keep else ())
        return found


@pytest.fixture
def machine() -> HostMachine:
    return HostMachine()


@pytest.fixture
def stamp() -> environment.Environment:
    return environment.collect()


@pytest.fixture
def eager_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without a C++ compiler: tracing and autograd are real, code generation is left out."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options))


@pytest.fixture
def traced_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing alone: for tests that call what was compiled and do not judge it. Its autograd is ``eager_compile``'s business."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="eager", **options))
