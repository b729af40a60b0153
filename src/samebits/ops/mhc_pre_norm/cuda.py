"""CUDA backend of ``mhc_pre_norm``: which kernels run a call. Every plan of a call has the same bits.

The forward is that of ``mhc_pre`` with the norm in its last kernel or behind it (ops/mhc_pre/cuda_forward.py). The backward
is two backwards, one behind the other: that of rmsnorm_residual, which leaves the gradient of hidden in FP32 scratch memory
(4 D bytes a token, written and read: 2 % of all that the second one moves), and that of mhc_pre.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call, Layout
from samebits.ops.fp32_gemm_rms.cuda import refuses as refuses
from samebits.ops.mhc_pre.cuda_backward import BackwardPlan, plans_backward, run_backward
from samebits.ops.mhc_pre.cuda_forward import ForwardPlan, plans_forward, run_forward
from samebits.ops.mhc_pre_norm.reference import norm_contract
from samebits.ops.mhc_pre_norm.spec import SPEC
from samebits.ops.rmsnorm_residual import cuda as rmsnorm
from samebits.runtime.launch import Launch
from samebits.runtime.sweep import cuda_builds


@dataclass(frozen=True)
class NormBackwardPlan:
    """The launches of a backward; ``mix`` is None where only grad_gamma is wanted."""

    norm_call: Call
    norm: tuple[Launch, ...]
    mix_call: Call
    mix: BackwardPlan | None

    def __iter__(self) -> Iterator[Launch]:
        yield from self.norm
        if self.mix is not None:
            yield from self.mix

    def __str__(self) -> str:
        return "; then ".join(str(step) for step in self)


def plans(call: Call) -> tuple[ForwardPlan, ...] | tuple[NormBackwardPlan, ...]:
    if not call.backward:
        return plans_forward(call)
    norm_call, mix_call = _norm_call(call), _mix_call(call)
    norms = rmsnorm.plans(norm_call)
    mixes: tuple[BackwardPlan | None, ...] = plans_backward(mix_call) if mix_call.wanted else (None,)
    most = max(len(norms), len(mixes))
    return tuple(
        NormBackwardPlan(norm_call, norms[i % len(norms)], mix_call, mixes[i % len(mixes)]) for i in range(most)
    )


def run(
    call: Call,
    plan: ForwardPlan | NormBackwardPlan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    if isinstance(plan, ForwardPlan):
        run_forward(call, plan, inputs, results, scalars)
        return
    given = {_NORM_NAMES.get(name, name): tensor for name, tensor in inputs.items() if name in _NORM_INPUTS}
    normed = {name: results[name] for name in ("grad_gamma",) if name in results}
    grad_hidden = None
    if plan.mix is not None:
        grad_hidden = normed["grad_x"] = torch.empty_like(inputs["hidden"], dtype=torch.float32, memory_format=_DENSE)
    rmsnorm.run(plan.norm_call, plan.norm, given, normed, {"eps": scalars["norm_eps"]})
    if plan.mix is not None and grad_hidden is not None:
        run_backward(plan.mix_call, plan.mix, inputs | {"grad_hidden": grad_hidden}, results, scalars)


_DENSE = torch.contiguous_format
_NORM_NAMES = {"grad_normalized": "grad_y", "grad_hidden": "grad_residual", "hidden": "x"}
"""What rmsnorm_residual calls them."""
_NORM_INPUTS = ("grad_normalized", "grad_hidden", "hidden", "gamma", "rstd", "start_gamma")


def _norm_call(call: Call) -> Call:
    mixed = any(name != "grad_gamma" for name in call.wanted)
    return dataclasses.replace(
        call,
        op="rmsnorm_residual",
        contract=norm_contract(call.contract),
        layouts=tuple((_NORM_NAMES.get(n, n), layout) for n, layout in call.layouts if n in _NORM_INPUTS),
        wanted=(*(("grad_x",) if mixed else ()), *(n for n in call.wanted if n == "grad_gamma")),
        grad_dtype="float32",
    )


def _mix_call(call: Call) -> Call:
    size = call.size("D")
    grad_hidden = ("grad_hidden", Layout("float32", (size, 1), size % 4 == 0))
    others = tuple((n, layout) for n, layout in call.layouts if n not in _NORM_INPUTS)
    return dataclasses.replace(
        call,
        op="mhc_pre",
        layouts=(grad_hidden, *others),
        wanted=tuple(n for n in call.wanted if n != "grad_gamma"),
    )


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
