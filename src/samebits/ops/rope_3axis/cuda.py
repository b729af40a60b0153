"""CUDA backend of ``rope_3axis``: the kernels of ``qk_norm_rope``, built with NORM 0 (ops/qk_norm_rope/cuda.py)."""

from __future__ import annotations

from samebits.audit.build import Build
from samebits.ops.qk_norm_rope.cuda import BETWEEN, plans, refuses, run
from samebits.ops.rope_3axis.spec import SPEC
from samebits.runtime.sweep import cuda_builds

__all__ = ["builds", "plans", "refuses", "run"]


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans, BETWEEN)
