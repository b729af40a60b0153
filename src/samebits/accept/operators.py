"""The operators of samebits as a provider, with one backend: composed one by one, or through the fused operators."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from samebits import registry
from samebits.accept.batch import Batch
from samebits.accept.contract import LayerContract
from samebits.accept.provider import OPERATORS, FusedSaved, PreGrads, PreSaved, Provider
from samebits.accept.reference import CONTRACT, ReferenceProvider, alphas

Form = Literal["composed", "fused"]

_RUN_BY = {"fixed_k_gemm": "fp32_gemm_rms"}
"""The fixed-K product is the projection of ``fp32_gemm_rms``: the same folds, the other results left alone."""


class OperatorProvider(ReferenceProvider):
    """``backend`` runs what it declares; the rest is the reference's, and provenance says ``+oracle-rest``.

    In the form ``composed`` the composites are made of single operators. In the form ``fused`` they are the operators
    ``mhc_pre`` and ``mhc_pre_norm``, forward and backward, with the leg of ``mhc_post`` merged inside.
    """

    def __init__(self, backend: str, name: str | None = None, form: Form = "composed") -> None:
        self.backend = backend
        self.name = name or backend
        self.form: Form = form

    def forms(self) -> tuple[OperatorProvider, ...]:
        """This provider once for every way in which it can run a block; each of them is held to the same bytes."""
        fused = self._runs("mhc_pre") and self._runs("mhc_pre_norm")
        forms: tuple[Form, ...] = ("composed", "fused") if fused else ("composed",)
        return tuple(OperatorProvider(self.backend, self.name, form) for form in forms)

    def capabilities(self) -> dict[str, Any]:
        fused = ["mhc_pre_rmsnorm_fused"] if self._runs("mhc_pre_norm") else []
        return super().capabilities() | {
            "backend": self.backend,
            "devices": ["cpu", "cuda"] if self.backend == "reference" else ["cuda"],
            "implemented_operators": [name for name in OPERATORS if self._runs(name)] + fused,
        }

    def provenance(self) -> dict[str, Any]:
        # A composite that the backend has no operator for is made of its own single ones, not taken from the oracle.
        rest = any(not self._runs(name) for name in OPERATORS if name != "mhc_pre")
        actual = self.backend + ("+oracle-rest" if rest else "")
        return super().provenance() | {"requested_backend": self.name, "actual_backend": actual, "form": self.form}

    # --- operators ------------------------------------------------------------------------------------------------

    def hc_split_sinkhorn_fwd(
        self, h: Tensor, contract: LayerContract | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        if not self._runs("hc_split_sinkhorn"):
            return super().hc_split_sinkhorn_fwd(h, contract)
        found = self._forward("hc_split_sinkhorn", logits=h)
        return found["pre"], found["post"], found["comb"], h

    def hc_split_sinkhorn_bwd(self, d_pre: Tensor, d_post: Tensor, d_c: Tensor, saved: Any) -> Tensor:
        if not self._runs("hc_split_sinkhorn"):
            return super().hc_split_sinkhorn_bwd(d_pre, d_post, d_c, saved)
        given = {"grad_pre": d_pre, "grad_post": d_post, "grad_comb": d_c, "logits": saved}
        return self._backward("hc_split_sinkhorn", given)["grad_logits"]

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        if not self._runs("fp32_gemm_rms"):
            return super().fp32_gemm_rms_fwd(x_flat, weight, eps)
        found = self._forward("fp32_gemm_rms", {"eps": eps}, x=x_flat, weight=weight)
        return found["proj"], found["r"], (found["r"], found["q"])

    def fp32_gemm_rms_bwd(
        self, dp: Tensor, dr: Tensor, x_flat: Tensor, weight: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._runs("fp32_gemm_rms"):
            return super().fp32_gemm_rms_bwd(dp, dr, x_flat, weight, saved)
        r, q = saved
        given = {"grad_proj": dp, "grad_r": dr, "x": x_flat, "weight": weight, "r": r, "q": q}
        found = self._backward("fp32_gemm_rms", given)
        return found["grad_x"], found["grad_weight"]

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        if not self._runs("mhc_post"):
            return super().mhc_post_fwd(r_old, y, c, post)
        return self._forward("mhc_post", residual=r_old, sublayer=y, comb=c, post=post)["streams"]

    def mhc_post_bwd(
        self, d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not self._runs("mhc_post"):
            return super().mhc_post_bwd(d_r_new, r_old, y, c, post)
        given = {"grad_streams": d_r_new, "residual": r_old, "sublayer": y, "comb": c, "post": post}
        found = self._backward("mhc_post", given)
        return found["grad_residual"], found["grad_sublayer"], found["grad_comb"], found["grad_post"]

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        if not self._runs("h_aggregate"):
            return super().h_aggregate_fwd(pre, r_old)
        return self._forward("h_aggregate", pre=pre, residual=r_old)["hidden"]

    def h_aggregate_bwd(self, d_hidden: Tensor, pre: Tensor, r_old: Tensor) -> tuple[Tensor, Tensor]:
        if not self._runs("h_aggregate"):
            return super().h_aggregate_bwd(d_hidden, pre, r_old)
        found = self._backward("h_aggregate", {"grad_hidden": d_hidden, "pre": pre, "residual": r_old})
        return found["grad_residual"], found["grad_pre"]

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        if not self._runs("rmsnorm_residual"):
            return super().rmsnorm_residual_fwd(x, gamma, eps)
        found = self._forward("rmsnorm_residual", {"eps": eps}, x=x, gamma=gamma)
        return found["y"], found["residual"], found["rstd"]

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._runs("rmsnorm_residual"):
            return super().rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)
        given = {"grad_y": dy, "grad_residual": d_residual, "x": x, "gamma": gamma, "rstd": saved}
        found = self._backward("rmsnorm_residual", given)
        return found["grad_x"], found["grad_gamma"]

    def fixed_k_gemm_fwd(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self._runs("fixed_k_gemm"):
            return super().fixed_k_gemm_fwd(x, weight)
        return self._forward("fp32_gemm_rms", x=x, weight=weight)["proj"]

    def fixed_k_gemm_bwd(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """q = 0 switches the RMS leg off: what is added to the projection leg, which is never -0, is +0."""
        if not self._runs("fixed_k_gemm"):
            return super().fixed_k_gemm_bwd(dy, x, weight)
        none = torch.zeros_like(x[:, 0])
        given = {"grad_proj": dy, "grad_r": none, "x": x, "weight": weight, "r": none, "q": none}
        found = self._backward("fp32_gemm_rms", given)
        return found["grad_x"], found["grad_weight"]

    # --- composites -----------------------------------------------------------------------------------------------

    def mhc_pre_fwd(self, batch: Batch, ops: Provider) -> tuple[Tensor, Tensor, Tensor, Tensor, PreSaved]:
        if self.form == "composed":
            return super().mhc_pre_fwd(batch, ops)
        found = self._forward("mhc_pre", {"eps": batch.contract.mhc_eps}, **_controller(batch))
        return found["hidden"], found["pre"], found["post"], found["comb"], _saved(found)

    def mhc_pre_rmsnorm_fused_fwd(
        self, batch: Batch, ops: Provider
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, FusedSaved]:
        if self.form == "composed":
            return super().mhc_pre_rmsnorm_fused_fwd(batch, ops)
        eps = {"eps": batch.contract.mhc_eps, "norm_eps": batch.contract.rmsnorm_eps}
        found = self._forward("mhc_pre_norm", eps, **_controller(batch), gamma=batch.weights.gamma)
        hidden = found["hidden"]
        saved = FusedSaved(_saved(found), found["rstd"])
        # The operator does not write the copy of hidden a second time.
        return hidden, found["normalized"], hidden.clone(), found["post"], found["comb"], saved

    def mhc_pre_bwd(
        self, d_hidden: Tensor, d_post: Tensor, d_c: Tensor, batch: Batch, saved: PreSaved, ops: Provider
    ) -> PreGrads:
        if self.form == "composed":
            return super().mhc_pre_bwd(d_hidden, d_post, d_c, batch, saved, ops)
        forward: dict[str, Tensor] = saved.own
        weights = {name: tensor for name, tensor in _controller(batch).items() if name != "bias"}
        kept = ("comb", "pre", "logits", "proj", "r", "q")
        given = weights | {name: forward[name] for name in kept}
        given |= {"grad_post": d_post, "grad_comb": d_c, "grad_streams": batch.d_r_new}
        through_norm = "rstd" in forward
        if through_norm:  # from above the norm down: d_hidden, which it recomputes, is not given
            given |= {"grad_normalized": batch.d_normalized, "grad_hidden": batch.d_residual}
            given |= {"gamma": batch.weights.gamma, "hidden": forward["hidden"], "rstd": forward["rstd"]}
        else:
            given |= {"grad_hidden": d_hidden}
        frozen = ("grad_weight", "grad_gain", "grad_bias") if batch.contract.mixer_frozen else ()
        found = self._backward("mhc_pre_norm" if through_norm else "mhc_pre", given, frozen)
        d_r_old, d_gamma = found["grad_residual"], found.get("grad_gamma")
        if frozen:
            return PreGrads(d_r_old, None, None, None, None, None, merged=True, d_gamma=d_gamma)
        gains = alphas(found["grad_gain"])
        return PreGrads(d_r_old, found["grad_weight"], *gains, found["grad_bias"], merged=True, d_gamma=d_gamma)

    # --- calling --------------------------------------------------------------------------------------------------

    def _runs(self, name: str) -> bool:
        """Whether the backend has this operator under our contract, by the operator's own declaration."""
        op = _RUN_BY.get(name, name)
        return op in registry.names() and registry.spec(op).keeps(self.backend, CONTRACT)

    def _forward(self, name: str, scalars: dict[str, Any] | None = None, **given: Tensor) -> dict[str, Tensor]:
        op = registry.operator(name)
        tensors = [given[arg.name] for arg in op.spec.forward.inputs]
        results = op.forward(*tensors, contract=CONTRACT, backend=self.backend, **(scalars or {}))
        return {result.name: value for result, value in zip(op.spec.forward.results, results, strict=True)}

    def _backward(self, name: str, given: dict[str, Tensor], unwanted: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Absent inputs are None: a needed one is then missed by its name, an optional one counts as absent."""
        op = registry.operator(name)
        unknown = given.keys() - {arg.name for arg in op.spec.backward.inputs}
        if unknown:
            raise TypeError(f"{name}_backward has no input named {', '.join(sorted(unknown))}")
        tensors = [given.get(arg.name) for arg in op.spec.backward.inputs]
        wanted = [result.name not in unwanted for result in op.spec.backward.results]
        results = op.backward(*tensors, contract=CONTRACT, backend=self.backend, wanted=wanted)
        pairs = zip(op.spec.backward.results, results, strict=True)
        return {result.name: value for result, value in pairs if value is not None}


def _controller(batch: Batch) -> dict[str, Tensor]:
    weights = batch.weights
    return {
        "residual": batch.r_old,
        "weight": weights.controller,
        "gain": weights.gain(),
        "bias": weights.bias,
    }


def _saved(found: dict[str, Tensor]) -> PreSaved:
    p, r, h = found["proj"], found["r"], found["logits"]
    return PreSaved(p, r, h, found["pre"], found["post"], found["comb"], own=found)
