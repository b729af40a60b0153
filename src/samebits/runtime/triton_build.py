"""Compile a Triton kernel for a named architecture, with or without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Passed to every launch and every audit build: without it Triton contracts a * b + c into one rounding."""


@dataclass(frozen=True)
class TritonKernel:
    """One specialisation of a ``triton.jit`` function, as the audit builds it and the launcher runs it.

    ``signature`` maps every argument to its Triton type (``*bf16``, ``i64``, ``constexpr`` ...).
    """

    function: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    num_warps: int = 4

    @property
    def name(self) -> str:
        shown = ",".join(f"{key}={value}" for key, value in self.constexprs)
        return f"{self.function.__name__}[{shown}]"


def compile_kernel(kernel: TritonKernel, arch: int) -> dict[str, Any]:
    """Build for compute capability ``arch`` (80, 90, 100). Returns Triton's ``asm`` mapping: ptx (str), cubin (bytes)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel.function, signature=dict(kernel.signature), constexprs=dict(kernel.constexprs))
    built = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={**OPTIONS, "num_warps": kernel.num_warps}
    )
    return dict(built.asm)
