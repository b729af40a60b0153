"""One hyper-connection block through a provider, forward and backward, with a digest at every boundary.

Forward: mhc_pre -> rmsnorm_residual -> (the sublayer, which is not part of it, gives y) -> mhc_post. Backward: mhc_post ->
rmsnorm_residual -> mhc_pre -> the legs of the streams' gradient are added: (collapse + controller) + mhc_post.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samebits.accept.batch import Batch
from samebits.accept.provider import Provider, check_capability
from samebits.accept.trace import Trace

FORWARD = (
    "controller.p",
    "controller.r",
    "controller.h",
    "split.pre",
    "split.post",
    "split.c",
    "pre.hidden",
    "norm.normalized",
    "norm.residual",
    "post.r_new",
)
BACKWARD = (
    *("bwd.dy_sublayer", "bwd.d_c", "bwd.d_post", "bwd.d_hidden", "bwd.d_gamma", "bwd.d_r_old"),
    *(f"bwd.d_stream{index}" for index in range(4)),
)
SHARED_GRADIENTS = ("d_r_old", "dy_sublayer", "d_hidden", "d_gamma", "d_c", "d_post")
"""Recorded a second time as ``grad.<key>``, before those of the controller."""
CONTROLLER_GRADIENTS = ("d_controller_weight", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_bias")
"""None where the mixer is frozen."""
PARAMETER_GRADIENTS = ("d_gamma", *CONTROLLER_GRADIENTS)

NOTES = {
    "reductions": "left fold from +0 over ascending index; 4-tree (t0 + t1) + (t2 + t3) over streams and in Sinkhorn",
    "fma": "forbid",
    "controller_rms": "1 / (sqrt(sum) / sqrt(K) + eps), IEEE operations",
    "norm_rms": "rsqrt(sum / D + eps), rsqrt of the device",
    "downcasts": ["pre.hidden", "norm.normalized", "post.r_new"],
    "zero_row": "a row of zeros has no RMS gradient: that leg is +0, not the NaN of the formula",
}


def boundary_names(mixer_frozen: bool) -> tuple[str, ...]:
    """All names in the order of recording: 32, or 27 with a frozen mixer."""
    controller = () if mixer_frozen else CONTROLLER_GRADIENTS
    return (*FORWARD, *BACKWARD, *(f"grad.{key}" for key in (*SHARED_GRADIENTS, *controller)), "r_new")


def is_row(name: str) -> bool:
    """Whether the first axis of this boundary is the token."""
    return name.partition(".")[2] not in PARAMETER_GRADIENTS


def run_block(provider: Provider, batch: Batch) -> Trace:
    """Forward and backward. Raises NotImplementedError where the provider does not declare or does not have what it needs."""
    batch.check_seal()
    contract, weights = batch.contract, batch.weights
    check_capability(provider, contract, batch.rows)
    trace = Trace(batch.device, _notes(provider, batch))

    def record(name: str, tensor: Tensor) -> None:
        trace.add(name, tensor, is_row(name))

    if contract.fusion_mode == "fused-pre-norm":
        fused = provider.mhc_pre_rmsnorm_fused_fwd(batch, provider)
        hidden, normalized, residual, post, c, both = fused
        saved, norm_saved = both.pre, both.norm
    else:
        hidden, _, post, c, saved = provider.mhc_pre_fwd(batch, provider)
        normalized, residual, norm_saved = provider.rmsnorm_residual_fwd(hidden, weights.gamma, contract.rmsnorm_eps)
    r_new = provider.mhc_post_fwd(batch.r_old, batch.y, c, post)
    values = (saved.p, saved.r, saved.h, saved.pre, post, c, hidden, normalized, residual, r_new)
    for name, value in zip(FORWARD, values, strict=True):
        if name == "norm.residual":
            trace.add_copy(name, value, hidden)
        else:
            record(name, value)

    post_leg, dy, d_c, d_post = provider.mhc_post_bwd(batch.d_r_new, batch.r_old, batch.y, c, post)
    d_hidden, d_gamma = provider.rmsnorm_residual_bwd(
        batch.d_normalized, batch.d_residual, hidden, weights.gamma, norm_saved
    )
    pre = provider.mhc_pre_bwd(d_hidden, d_post, d_c, batch, saved, provider)
    d_r_old = pre.d_r_old if pre.merged else pre.d_r_old + post_leg
    gradients = {
        "d_r_old": d_r_old,
        "dy_sublayer": dy,
        "d_hidden": d_hidden,
        "d_gamma": d_gamma,
        "d_c": d_c,
        "d_post": d_post,
    }
    for name in BACKWARD[:6]:
        record(name, gradients[name.removeprefix("bwd.")])
    for index, name in enumerate(BACKWARD[6:]):
        record(name, d_r_old[:, index])
    if pre.d_gamma is not None:
        gradients["d_gamma"] = pre.d_gamma
    for key in SHARED_GRADIENTS:
        record(f"grad.{key}", gradients[key])
    for key in CONTROLLER_GRADIENTS:
        if getattr(pre, key) is not None:
            record(f"grad.{key}", getattr(pre, key))
    record("r_new", r_new)
    return trace


def _notes(provider: Provider, batch: Batch) -> dict[str, Any]:
    contract = batch.contract
    return NOTES | {
        "fusion_mode": contract.fusion_mode,
        "trainability": contract.trainability,
        "contract_fingerprint": contract.fingerprint(),
        "weight_fingerprint": batch.seal,
        "provenance": dict(provider.provenance()),
    }
