"""CUDA backend of ``rmsnorm_modulated``: the kernels of ``rmsnorm``, built with MODULATED 1 (ops/rmsnorm/cuda.py)."""

from __future__ import annotations

from samebits.audit.build import Build
from samebits.ops.rmsnorm.cuda import plans, run
from samebits.ops.rmsnorm_modulated.spec import SPEC
from samebits.runtime.sweep import cuda_builds

__all__ = ["builds", "plans", "run"]


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
