"""The empty kernel: what a launch costs when there is nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samebits.bench.work import Run
from samebits.runtime.nvrtc import CudaKernel


@dataclass(frozen=True)
class BenchKernel(CudaKernel):
    """A kernel of this folder. It belongs to no operator, so it has no headers but the general ones."""

    @property
    def source(self) -> str:
        return f"bench/{self.entry}.cu"


EMPTY = BenchKernel(op="", entry="empty")


def prepare() -> Run:
    from samebits.runtime.launch import Launch, launch

    plan = Launch(EMPTY, grid=1, block=32)

    def run() -> tuple[Tensor, ...]:
        launch(plan)
        return ()

    return run
