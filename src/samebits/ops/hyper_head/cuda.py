"""CUDA backend of ``hyper_head``: which kernels run a call. Every plan of a call has the same bits.

Forward and backward are those of ``mhc_pre`` with four controller outputs, no post, no comb and no further leg.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.fp32_gemm_rms.cuda import refuses as refuses
from samebits.ops.hyper_head.spec import SPEC
from samebits.ops.mhc_pre.cuda_backward import BackwardPlan, plans_backward, run_backward
from samebits.ops.mhc_pre.cuda_forward import ForwardPlan, plans_forward, run_forward
from samebits.runtime.sweep import cuda_builds


def plans(call: Call) -> tuple[ForwardPlan, ...] | tuple[BackwardPlan, ...]:
    return plans_backward(call) if call.backward else plans_forward(call)


def run(
    call: Call,
    plan: ForwardPlan | BackwardPlan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    if isinstance(plan, ForwardPlan):
        run_forward(call, plan, inputs, results, scalars)
    else:
        run_backward(call, plan, inputs, results, scalars)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
