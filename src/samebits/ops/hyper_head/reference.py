"""Defines the bits of ``hyper_head`` by composition. One FP32 rounding per written operation; runs on any device.

``exp`` is the device's own, as in ``hc_split_sinkhorn``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary, fold
from samebits.ops.fp32_gemm_rms import reference as gemm_rms
from samebits.ops.h_aggregate import reference as h_aggregate
from samebits.ops.mhc_pre import reference as mhc_pre

EPS = 1e-6
FORWARD = ("hidden", "pre", "logits", "proj", "r", "q")


def gate(logits: Tensor) -> Tensor:
    """sigmoid(logits) + eps."""
    value = elementary.sigmoid(logits)
    return value + torch.full_like(value, EPS)


def forward(
    residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float, contract: str
) -> tuple[Tensor, ...]:
    """The results named in ``FORWARD``."""
    proj, r, q = gemm_rms.forward(residual.flatten(1), weight, eps, contract)
    logits = mhc_pre.affine(proj, r, gain, bias)
    gate = elementary.sigmoid(logits)
    pre = gate + torch.full_like(gate, EPS)
    return h_aggregate.forward(pre, residual), pre, logits, proj, r, q


def backward_logits(grad_pre: Tensor, logits: Tensor) -> Tensor:
    """grad_pre * (s * (1 - s)), s = sigmoid(logits)."""
    gate = elementary.sigmoid(logits)
    return grad_pre * (gate * (torch.ones_like(gate) - gate))


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    residual, weight, gain, contract = inputs["residual"], inputs["weight"], inputs["gain"], call.contract
    if not call.backward:
        values = forward(residual, weight, gain, inputs["bias"], scalars["eps"], contract)
        for name, value in zip(FORWARD, values, strict=True):
            results[name].copy_(value)
        return
    grad_hidden, proj, r, q = inputs["grad_hidden"], inputs["proj"], inputs["r"], inputs["q"]
    grad_logits = backward_logits(mhc_pre.backward_pre(grad_hidden, residual, contract), inputs["logits"])
    grad_proj, grad_r, grad_gain = mhc_pre.backward_controller(grad_logits, proj, r, gain)
    x = residual.flatten(1)
    if "grad_residual" in results:
        grad_x = gemm_rms.backward_x(grad_proj, grad_r, x, weight, r, q, contract)
        legs = h_aggregate.backward_residual(grad_hidden, inputs["pre"]) + grad_x.view_as(residual)
        results["grad_residual"].copy_(legs)
    if "grad_weight" in results:
        value = gemm_rms.backward_weight(grad_proj, x, inputs.get("start_weight"), contract)
        results["grad_weight"].copy_(value)
    if "grad_gain" in results:
        results["grad_gain"].copy_(fold.left_fold(grad_gain, 0, inputs.get("start_gain")))
    if "grad_bias" in results:
        results["grad_bias"].copy_(fold.left_fold(grad_logits, 0, inputs.get("start_bias")))
