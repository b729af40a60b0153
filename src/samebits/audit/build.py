"""What a backend hands to the audit: one kernel build and the contracts it serves. Imports neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.triton_build import TritonKernel


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, as the launcher runs it.

    ``contracts`` names every contract of the operator that launches this kernel; the code must keep the rules of all
    of them, so it may do only what each of them allows.
    """

    kernel: CudaKernel | TritonKernel
    contracts: tuple[str, ...]

    @property
    def backend(self) -> Literal["cuda", "triton"]:
        return "cuda" if isinstance(self.kernel, CudaKernel) else "triton"

    @property
    def label(self) -> str:
        """Unique per operator: a Triton kernel's name does not hold its argument types and warps, so they are added."""
        if isinstance(self.kernel, CudaKernel):
            return self.kernel.name
        types = ",".join(kind for _, kind in self.kernel.signature if kind != "constexpr")
        return f"{self.kernel.name}({types})w{self.kernel.num_warps}"
