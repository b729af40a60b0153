"""Defines the bits of ``mhc_pre_norm`` by composition of ``mhc_pre`` and ``rmsnorm_residual``; runs on any device."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.ops.fp32_gemm_rms.reference import is_fast
from samebits.ops.mhc_pre import reference as mhc_pre
from samebits.ops.rmsnorm_residual import reference as rmsnorm


def norm_contract(contract: str) -> str:
    """The contract of rmsnorm_residual inside a contract of this operator."""
    return "tree512" if is_fast(contract) else "ascending"


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    norm, gamma = norm_contract(call.contract), inputs["gamma"]
    if not call.backward:
        residual, weight, gain, bias = (inputs[name] for name in ("residual", "weight", "gain", "bias"))
        values = mhc_pre.forward(residual, weight, gain, bias, scalars["eps"], call.contract)
        for name, value in zip(mhc_pre.FORWARD, values, strict=True):
            results[name].copy_(value)
        normalized, rstd = rmsnorm.forward(values[0], gamma, scalars["norm_eps"], norm)
        results["normalized"].copy_(normalized)
        results["rstd"].copy_(rstd)
        return
    grad, hidden, rstd = inputs["grad_normalized"], inputs["hidden"], inputs["rstd"]
    if "grad_gamma" in results:
        results["grad_gamma"].copy_(rmsnorm.backward_gamma(grad, hidden, rstd, inputs.get("start_gamma")))
    if set(results) - {"grad_gamma"}:
        grad_hidden = rmsnorm.backward_x(grad, inputs.get("grad_hidden"), hidden, gamma, rstd, norm)
        mhc_pre.run(call, None, inputs | {"grad_hidden": grad_hidden}, results, scalars)
