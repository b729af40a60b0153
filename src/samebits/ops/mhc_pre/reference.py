"""Defines the bits of ``mhc_pre`` by composition. One FP32 rounding per written operation; runs on any device."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import fold
from samebits.ops.fp32_gemm_rms import reference as gemm_rms
from samebits.ops.h_aggregate import reference as h_aggregate
from samebits.ops.hc_split_sinkhorn import reference as split
from samebits.ops.mhc_post import reference as mhc_post

FORWARD = ("hidden", "post", "comb", "pre", "logits", "proj", "r", "q")


def affine(proj: Tensor, r: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """logits = ((r * proj) * gain) + bias."""
    return (r[:, None] * proj) * gain + bias


def forward(
    residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float, contract: str
) -> tuple[Tensor, ...]:
    """The results named in ``FORWARD``."""
    proj, r, q = gemm_rms.forward(residual.flatten(1), weight, eps, contract)
    logits = affine(proj, r, gain, bias)
    pre, post, comb = split.forward(logits)
    return h_aggregate.forward(pre, residual), post, comb, pre, logits, proj, r, q


def backward_pre(grad_hidden: Tensor, residual: Tensor, contract: str) -> Tensor:
    """grad_pre (T, 4)."""
    order = "tree256" if gemm_rms.is_fast(contract) else "ascending"
    return h_aggregate.backward_pre(grad_hidden, residual, order)


def backward_controller(grad_logits: Tensor, proj: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_proj (T, N), grad_r (T,), grad_gain per row (T, N)); grad_r is a left fold over ascending n."""
    scaled = grad_logits * gain
    return scaled * r[:, None], fold.left_fold(scaled * proj, -1), grad_logits * (r[:, None] * proj)


def merge(
    grad_hidden: Tensor,
    pre: Tensor,
    grad_x: Tensor,
    grad_streams: Tensor | None,
    comb: Tensor,
) -> Tensor:
    """grad_residual (T, 4, D) FP32: (collapse leg + controller leg) + leg of mhc_post."""
    legs = h_aggregate.backward_residual(grad_hidden, pre) + grad_x.view(*pre.shape, -1)
    return legs if grad_streams is None else legs + mhc_post.backward_residual(grad_streams, comb)


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
    grad_pre = backward_pre(grad_hidden, residual, contract)
    grad_logits = split.backward(grad_pre, inputs["grad_post"], inputs["grad_comb"], inputs["logits"])
    grad_proj, grad_r, grad_gain = backward_controller(grad_logits, proj, r, gain)
    x = residual.flatten(1)
    if "grad_residual" in results:
        grad_x = gemm_rms.backward_x(grad_proj, grad_r, x, weight, r, q, contract)
        merged = merge(grad_hidden, inputs["pre"], grad_x, inputs.get("grad_streams"), inputs["comb"])
        results["grad_residual"].copy_(merged)
    if "grad_weight" in results:
        value = gemm_rms.backward_weight(grad_proj, x, inputs.get("start_weight"), contract)
        results["grad_weight"].copy_(value)
    if "grad_gain" in results:
        results["grad_gain"].copy_(fold.left_fold(grad_gain, 0, inputs.get("start_gain")))
    if "grad_bias" in results:
        results["grad_bias"].copy_(fold.left_fold(grad_logits, 0, inputs.get("start_bias")))
