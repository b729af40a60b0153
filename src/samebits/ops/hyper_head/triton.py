"""``hyper_head`` in Triton, ascending contracts, with the bits of ``reference.py``: as ``mhc_pre``, with four outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.ops.mhc_pre.triton import lent, token_builds
from samebits.ops.mhc_pre.triton import plans as plans
from samebits.ops.mhc_pre.triton import run as run

if TYPE_CHECKING:
    from samebits.audit.build import Build


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return (*token_builds(4), *lent("fp32_gemm_rms", "h_aggregate"))
