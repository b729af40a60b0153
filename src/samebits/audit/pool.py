"""Audit many builds in processes: reading machine code is Python's own work, which threads would do one after another."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from samebits.audit.listing import Job
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.triton_build import TritonKernel

if TYPE_CHECKING:
    from samebits.audit.run import Report


@dataclass(frozen=True)
class _Named:
    """A Triton function by its name, which is how another process finds it; the object itself cannot travel."""

    module: str
    name: str


def in_processes(work: Sequence[tuple[Job, str]], workers: int) -> Iterator[Report]:
    """Reports in the order of ``work``."""
    # Spawned, not forked: torch and Triton have threads by now, and a fork copies what they hold locked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(work)), context) as pool:
        yield from pool.map(_audit, [(_packed(job), arch) for job, arch in work])


def _audit(task: tuple[Job, str]) -> Report:
    from samebits.audit.run import audit_build

    job, arch = task
    return audit_build(_unpacked(job), arch)


def _packed(job: Job) -> Job:
    kernel = job.build.kernel
    if isinstance(kernel, CudaKernel):
        return job
    named = _Named(kernel.function.__module__, kernel.function.__name__)
    return _with(job, replace(kernel, function=named))


def _unpacked(job: Job) -> Job:
    kernel = job.build.kernel
    if isinstance(kernel, CudaKernel):
        return job
    function = getattr(importlib.import_module(kernel.function.module), kernel.function.name)
    return _with(job, replace(kernel, function=function))


def _with(job: Job, kernel: TritonKernel) -> Job:
    return replace(job, build=replace(job.build, kernel=kernel))
