"""What a backend hands to the audit: one kernel build and the contracts it serves. Imports neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.triton_build import TritonKernel

_HOMES = ("samebits.ops.", "samebits.sequence_ops.")


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, as the launcher runs it.

    ``contracts`` names every contract of the operator that launches this kernel; the code must keep the rules of all
    of them, so it may do only what each of them allows.
    """

    kernel: CudaKernel | TritonKernel
    contracts: tuple[str, ...]
    arches: tuple[int, ...] = ()
    """Where it is launched, as compute capabilities times ten; none named: everywhere."""

    def launched_on(self, arch: int) -> bool:
        return not self.arches or arch in self.arches

    @property
    def backend(self) -> Literal["cuda", "triton"]:
        return "cuda" if isinstance(self.kernel, CudaKernel) else "triton"

    @property
    def owner(self) -> str:
        """The operator whose folder holds the source; for a Triton kernel from elsewhere the name of its module."""
        if isinstance(self.kernel, CudaKernel):
            return self.kernel.op
        module: str = self.kernel.function.__module__
        home = next((home for home in _HOMES if module.startswith(home)), None)
        return module if home is None else module.removeprefix(home).partition(".")[0]

    @property
    def entry(self) -> str:
        """The kernel as it is written, without what one build fixes."""
        return self.kernel.entry if isinstance(self.kernel, CudaKernel) else str(self.kernel.function.__name__)

    @property
    def label(self) -> str:
        """Unique among the kernels of its owner: what a Triton kernel's name lacks, argument types and warps, is added."""
        if isinstance(self.kernel, CudaKernel):
            return self.kernel.name
        types = ",".join(kind for _, kind in self.kernel.signature if kind != "constexpr")
        return f"{self.kernel.name}({types})w{self.kernel.num_warps}"
