"""CUDA backend of ``fp32_gemm_rms``: which kernels run a call, and their launches. Every plan of a call has the same bits.

Forward: the raw sums (cuda_sums.py), then ``finish.cu``. Backward: grad_x and grad_weight, one kernel or more each
(cuda_grads.py). The kernels of the fast contracts are in cuda_fast.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.fp32_gemm_rms.cuda_grads import (
    GradWeightPlan,
    grad_weight_plans,
    grad_x_plans,
    run_grad_weight,
    run_grad_x,
)
from samebits.ops.fp32_gemm_rms.cuda_sums import SumsPlan, projection, run_sums, sums_plans
from samebits.ops.fp32_gemm_rms.spec import SPEC
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds


@dataclass(frozen=True)
class Plan:
    """The launches of a call; what its direction or its wanted results do not need is None."""

    sums: SumsPlan | None = None
    finish: Launch | None = None
    grad_x: Launch | None = None
    grad_weight: GradWeightPlan | None = None

    def __iter__(self) -> Iterator[Launch]:
        yield from () if self.sums is None else self.sums.launches
        yield from (step for step in (self.finish, self.grad_x) if step is not None)
        yield from () if self.grad_weight is None else self.grad_weight.launches

    def __str__(self) -> str:
        return "; then ".join(str(step) for step in self)


def refuses(call: Call) -> str | None:
    """Why this backend does not take the call although its declaration would allow it."""
    if not call.contract.startswith("fast"):
        return None
    from samebits.ops.fp32_gemm_rms import cuda_fast

    return cuda_fast.refuses(call)


def plans(call: Call) -> tuple[Plan, ...]:
    given = projection(call)
    if not call.backward:
        defines = {"IS_FAST": int(given.fast), "IS_DSV4": int(call.contract.endswith("-dsv4"))}
        kernel = CudaKernel("fp32_gemm_rms", "finish", tuple(sorted(defines.items())))
        finish = Launch(kernel, -(-call.rows * (given.outputs + 1) // 256), 256)
        return tuple(Plan(sums=option, finish=finish) for option in sums_plans(given))
    xs = grad_x_plans(call) if "grad_x" in call.wanted else (None,)
    weights = grad_weight_plans(given) if "grad_weight" in call.wanted else (None,)
    most = max(len(xs), len(weights))
    return tuple(Plan(grad_x=xs[i % len(xs)], grad_weight=weights[i % len(weights)]) for i in range(most))


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    if plan.sums is not None and plan.finish is not None:
        outputs, size = weight.shape
        parts = results["proj"].new_empty(plan.sums.parts, call.rows, outputs + 1)
        run_sums(plan.sums, x, weight, parts)
        finished = (results["proj"], results["r"], results["q"])
        launch(plan.finish, parts, *finished, plan.sums.parts, call.rows, size, outputs, ctypes.c_float(scalars["eps"]))
    if plan.grad_x is not None:
        dsv4 = call.contract.endswith("-dsv4")
        run_grad_x(plan.grad_x, inputs, inputs["grad_proj"], inputs["grad_r"], results["grad_x"], dsv4)
    if plan.grad_weight is not None:
        start = inputs.get("start_weight")
        run_grad_weight(plan.grad_weight, inputs["grad_proj"], x, start, results["grad_weight"])


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans, {"N": (1, 9, 25, 33), "K": (6000, 30000)})
