"""Compile a build of ours for a named architecture, without a GPU, and read what came out. Results stay in memory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from samebits.audit import ptx, sass
from samebits.audit.build import Build
from samebits.audit.code import AuditError, Function, Module
from samebits.runtime import nvrtc, triton_build
from samebits.runtime.nvrtc import CudaKernel

ARCHES = ("sm_80", "sm_90", "sm_100")
"""What every kernel is audited for and the lock records."""


@dataclass(frozen=True)
class Compiled:
    """The text and code of one build for one architecture, not yet read."""

    arch: str
    ptx: str
    cubin: bytes


@dataclass(frozen=True)
class Read:
    ptx: Module
    sass: Module

    @property
    def kernel(self) -> Function:
        """The kernel itself; one build holds exactly one."""
        kernels = [function for function in self.sass.functions if function.entry]
        if len(kernels) != 1:
            raise AuditError(f"expected one kernel in the cubin, found {[k.name for k in kernels]}")
        return kernels[0]


def capability(arch: str) -> int:
    """``sm_90``, ``sm_90a`` or ``90`` -> 90."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})[af]?", arch)
    if not match:
        raise ValueError(f"{arch!r} is no architecture; write sm_80, sm_90, sm_100 ...")
    return int(match.group(1))


def arch_name(build: Build, arch: str) -> str:
    """What is built: CUDA for Hopper is always ``sm_90a``, as it is at run time."""
    number = capability(arch)
    return "sm_90a" if number == 90 and isinstance(build.kernel, CudaKernel) else f"sm_{number}"


@functools.lru_cache(maxsize=64)
def compile_build(build: Build, arch: str) -> Compiled:
    """:class:`AuditError` if the compiler refuses it."""
    name = arch_name(build, arch)
    try:
        if isinstance(build.kernel, CudaKernel):
            built = nvrtc.compile_kernel(build.kernel, name)
            return Compiled(name, built.ptx, built.cubin)
        made = triton_build.compile_kernel(build.kernel, capability(name))
    except Exception as error:
        # The compilers raise their own types, Triton even bare RuntimeErrors of LLVM; each is one finding, not the end.
        raise AuditError(f"does not compile for {name}: {type(error).__name__}: {error}") from error
    return Compiled(name, made["ptx"], made["cubin"])


def read(compiled: Compiled) -> Read:
    return pair(ptx.parse(compiled.ptx), sass.disassemble(compiled.cubin))


def pair(text: Module, code: Module) -> Read:
    """Refuse PTX and machine code that cannot be of one build: judging one by the other would be worthless."""
    if text.entries != code.entries:
        raise AuditError(
            f"PTX and cubin are not of one build: kernels {sorted(text.entries)} against {sorted(code.entries)}"
        )
    return Read(text, code)
