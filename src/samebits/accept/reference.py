"""The oracle: the layer composed of the code that defines each operator's bits. Runs on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.accept.batch import Batch
from samebits.accept.contract import FUSION_MODES, PROFILE, TRAINABILITIES, LayerContract
from samebits.accept.provider import OPERATORS, FusedSaved, PreGrads, PreSaved, Provider
from samebits.exact import fold
from samebits.ops.fp32_gemm_rms import reference as gemm_rms
from samebits.ops.h_aggregate import reference as h_aggregate
from samebits.ops.hc_split_sinkhorn import reference as split
from samebits.ops.mhc_post import reference as mhc_post
from samebits.ops.mhc_pre import reference as mhc_pre
from samebits.ops.rmsnorm_residual import reference as rmsnorm

CONTRACT = "ascending"
"""The contract of every operator in this profile: the published one."""


class ReferenceProvider:
    """Every operator by its reference. Inherit from it to bring some operators of your own and leave the rest."""

    name = "reference"
    numeric_profile = PROFILE

    def capabilities(self) -> dict[str, Any]:
        return {
            "backend": "pytorch",
            "geometry": ["one-row", "packed"],
            "devices": ["cpu", "cuda"],
            "fusion_modes": list(FUSION_MODES),
            "trainability": list(TRAINABILITIES),
            "placements": ["replicated"],
            "implemented_operators": [*OPERATORS, "mhc_pre_rmsnorm_fused"],
        }

    def provenance(self) -> dict[str, Any]:
        return {
            "requested_backend": self.name,
            "actual_backend": "pytorch",
            "numeric_profile": self.numeric_profile,
            "torch_version": torch.__version__,
        }

    # --- operators ------------------------------------------------------------------------------------------------

    def hc_split_sinkhorn_fwd(
        self, h: Tensor, contract: LayerContract | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        pre, post, c = split.forward(h)
        return pre, post, c, h

    def hc_split_sinkhorn_bwd(self, d_pre: Tensor, d_post: Tensor, d_c: Tensor, saved: Any) -> Tensor:
        return split.backward(d_pre, d_post, d_c, saved)

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        p, r, q = gemm_rms.forward(x_flat, weight, eps, CONTRACT)
        return p, r, (r, q)

    def fp32_gemm_rms_bwd(
        self, dp: Tensor, dr: Tensor, x_flat: Tensor, weight: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        r, q = saved
        d_x = gemm_rms.backward_x(dp, dr, x_flat, weight, r, q, CONTRACT)
        return d_x, gemm_rms.backward_weight(dp, x_flat, None, CONTRACT)

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return mhc_post.forward(r_old, y, c, post)

    def mhc_post_bwd(
        self, d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            mhc_post.backward_residual(d_r_new, c),
            mhc_post.backward_sublayer(d_r_new, post),
            mhc_post.backward_comb(d_r_new, r_old, CONTRACT),
            mhc_post.backward_post(d_r_new, y, CONTRACT),
        )

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        return h_aggregate.forward(pre, r_old)

    def h_aggregate_bwd(self, d_hidden: Tensor, pre: Tensor, r_old: Tensor) -> tuple[Tensor, Tensor]:
        d_pre = h_aggregate.backward_pre(d_hidden, r_old, CONTRACT)
        return h_aggregate.backward_residual(d_hidden, pre), d_pre

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        y, rstd = rmsnorm.forward(x, gamma, eps, CONTRACT)
        return y, x.clone(), rstd

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        d_x = rmsnorm.backward_x(dy, d_residual, x, gamma, saved, CONTRACT)
        return d_x, rmsnorm.backward_gamma(dy, x, saved)

    def fixed_k_gemm_fwd(self, x: Tensor, weight: Tensor) -> Tensor:
        return gemm_rms.project(x, weight)

    def fixed_k_gemm_bwd(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        d_x = gemm_rms.backward_projection(dy, weight, CONTRACT)
        return d_x, gemm_rms.backward_weight(dy, x, None, CONTRACT)

    # --- composites, made of the operators of ``ops`` --------------------------------------------------------------

    def mhc_pre_fwd(self, batch: Batch, ops: Provider) -> tuple[Tensor, Tensor, Tensor, Tensor, PreSaved]:
        weights, contract = batch.weights, batch.contract
        p, r, gemm = ops.fp32_gemm_rms_fwd(batch.r_old.float().flatten(1), weights.controller, contract.mhc_eps)
        h = mhc_pre.affine(p, r, weights.gain(), weights.bias)
        pre, post, c, sinkhorn = ops.hc_split_sinkhorn_fwd(h, contract)
        hidden = ops.h_aggregate_fwd(pre, batch.r_old)
        return hidden, pre, post, c, PreSaved(p, r, h, pre, post, c, gemm, sinkhorn)

    def mhc_pre_bwd(
        self, d_hidden: Tensor, d_post: Tensor, d_c: Tensor, batch: Batch, saved: PreSaved, ops: Provider
    ) -> PreGrads:
        weights, gain = batch.weights, batch.weights.gain()
        collapse_leg, d_pre = ops.h_aggregate_bwd(d_hidden, saved.pre, batch.r_old)
        d_h = ops.hc_split_sinkhorn_bwd(d_pre, d_post, d_c, saved.sinkhorn)
        d_p, d_r, d_gain = mhc_pre.backward_controller(d_h, saved.p, saved.r, gain)
        x_flat = batch.r_old.float().flatten(1)
        d_x, d_weight = ops.fp32_gemm_rms_bwd(d_p, d_r, x_flat, weights.controller, saved.gemm)
        d_r_old = collapse_leg + d_x.view_as(collapse_leg)
        if batch.contract.mixer_frozen:
            return PreGrads(d_r_old, None, None, None, None, None)
        return PreGrads(d_r_old, d_weight, *alphas(fold.left_fold(d_gain, 0)), fold.left_fold(d_h, 0))

    def mhc_pre_rmsnorm_fused_fwd(
        self, batch: Batch, ops: Provider
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, FusedSaved]:
        hidden, _, post, c, saved = ops.mhc_pre_fwd(batch, ops)
        eps = batch.contract.rmsnorm_eps
        normalized, residual, norm = ops.rmsnorm_residual_fwd(hidden, batch.weights.gamma, eps)
        return hidden, normalized, residual, post, c, FusedSaved(saved, norm)


def alphas(d_gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (1,) of alpha_pre, alpha_post and alpha_res: a left fold over each one's part of the 24 gains."""
    parts = (fold.left_fold(part, 0).reshape(1) for part in d_gain.split((4, 4, 16)))
    pre, post, res = parts
    return pre, post, res
