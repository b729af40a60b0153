"""Providers with one fault each, and some that are no providers at all. Acceptance has to see every one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from samebits.accept import ReferenceProvider, StubProvider
from samebits.accept.contract import LayerContract
from samebits.exact.bits import bits


def flipped(tensor: Tensor, index: tuple[int, ...]) -> Tensor:
    """A copy with the lowest bit of one element turned over."""
    changed = tensor.clone()
    bits(changed)[index] ^= 1
    return changed


class Right(ReferenceProvider):
    """No fault."""

    name = "right"


class OneBit(ReferenceProvider):
    name = "one-bit"

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return flipped(super().mhc_post_fwd(r_old, y, c, post), (-1, 2, 5))


class OneBitOfAParameterGradient(ReferenceProvider):
    name = "one-bit-of-a-parameter"

    def rmsnorm_residual_bwd(self, *given: Any) -> tuple[Tensor, Tensor]:
        dx, dgamma = super().rmsnorm_residual_bwd(*given)
        return dx, flipped(dgamma, (7,))


class Omits(ReferenceProvider):
    name = "omits"

    def mhc_pre_bwd(self, *given: Any) -> Any:
        return dataclasses.replace(super().mhc_pre_bwd(*given), d_bias=None)


class Adds(ReferenceProvider):
    """Zeros for a frozen controller, where the contract has no gradient."""

    name = "adds"

    def mhc_pre_bwd(self, *given: Any) -> Any:
        grads = super().mhc_pre_bwd(*given)
        return dataclasses.replace(grads, d_bias=torch.zeros(24)) if grads.d_bias is None else grads


class ForwardDependsOnT(ReferenceProvider):
    """Right in the packed batch; a row alone has another last bit."""

    name = "forward-depends-on-t"

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        p, r, saved = super().fp32_gemm_rms_fwd(x_flat, weight, eps)
        return (flipped(p, (0, 3)) if len(x_flat) == 1 else p), r, saved


class BackwardDependsOnOthers(ReferenceProvider):
    """The gradient of a row has another last bit where no other row stands beside it; the forward is right."""

    name = "backward-depends-on-others"

    def mhc_post_bwd(self, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dr, dy, dc, dpost = super().mhc_post_bwd(*given)
        return dr, dy, (dc if len(dc) > 1 else flipped(dc, (0, 1, 1))), dpost


class SignOfZero(ReferenceProvider):
    """Zeros of the streams' gradient come out negative where a row is alone: equal as values, not as bytes."""

    name = "sign-of-zero"

    def mhc_pre_bwd(self, *given: Any) -> Any:
        grads = super().mhc_pre_bwd(*given)
        alone = torch.where(grads.d_r_old == 0, -0.0, grads.d_r_old)
        return dataclasses.replace(grads, d_r_old=alone) if len(alone) == 1 else grads

    def mhc_post_bwd(self, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dr, dy, dc, dpost = super().mhc_post_bwd(*given)
        return torch.where(dr == 0, -0.0, dr) if len(dr) == 1 else dr, dy, dc, dpost


class NegativeZeros(ReferenceProvider):
    """-0 for +0 in the packed batch as well."""

    name = "negative-zeros"

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        hidden = super().h_aggregate_fwd(pre, r_old)
        return torch.where(hidden == 0, -torch.zeros_like(hidden), hidden)


class FormulaAsPublished(ReferenceProvider):
    """The RMS leg of a zero row by the formula: 0 * (x / 0)."""

    name = "formula-as-published"

    def fp32_gemm_rms_bwd(
        self, dp: Tensor, dr: Tensor, x_flat: Tensor, weight: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        dx, dw = super().fp32_gemm_rms_bwd(dp, dr, x_flat, weight, saved)
        zero_row = (saved[1] == 0)[:, None]
        return torch.where(zero_row, torch.nan, dx), dw


class CountsPadding(ReferenceProvider):
    """The mean over the rows in place of their sum, scaled by a fixed number of them: padding changes it."""

    name = "counts-padding"

    def rmsnorm_residual_bwd(self, *given: Any) -> tuple[Tensor, Tensor]:
        dx, dgamma = super().rmsnorm_residual_bwd(*given)
        return dx, dgamma * (9 / len(dx))


class NoCopy(ReferenceProvider):
    name = "no-copy"

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        y, _, saved = super().rmsnorm_residual_fwd(x, gamma, eps)
        return y, x, saved


class ChangesItsInput(ReferenceProvider):
    name = "changes-its-input"

    def mhc_post_bwd(self, d_r_new: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = super().mhc_post_bwd(d_r_new, *rest)
        d_r_new.zero_()
        return found


class UsesItsMemoryAgain(ReferenceProvider):
    """The right bytes at the time; later calls overwrite them. That is no fault of the bytes."""

    name = "uses-its-memory-again"

    def __init__(self) -> None:
        self.buffer = torch.empty(16, 4, 128, dtype=torch.bfloat16)

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return self.buffer[: len(r_old)].copy_(super().mhc_post_fwd(r_old, y, c, post))


class OtherShape(ReferenceProvider):
    """The right bytes in the wrong shape."""

    name = "other-shape"

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return super().mhc_post_fwd(r_old, y, c, post).flatten(1)


class OtherDtype(ReferenceProvider):
    """The right values, unrounded dtype."""

    name = "other-dtype"

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        y, residual, saved = super().rmsnorm_residual_fwd(x, gamma, eps)
        return y.float(), residual, saved


class NothingWhereATensorBelongs(ReferenceProvider):
    name = "nothing"

    def mhc_post_bwd(self, *given: Any) -> Any:
        dr, dy, _, dpost = super().mhc_post_bwd(*given)
        return dr, dy, None, dpost


class Crashes(ReferenceProvider):
    name = "crashes"

    def h_aggregate_bwd(self, *given: Any) -> Any:
        raise RuntimeError("an illegal memory access")


class OtherProfile(ReferenceProvider):
    name = "other-profile"
    numeric_profile = "mhc-tree256"


class NoFrozenMixer(ReferenceProvider):
    name = "no-frozen-mixer"

    def capabilities(self) -> dict[str, Any]:
        return super().capabilities() | {"trainability": ["full"]}


class OnlyPacked(ReferenceProvider):
    name = "only-packed"

    def capabilities(self) -> dict[str, Any]:
        return super().capabilities() | {"geometry": ["packed"]}


class SecondFormIsWrong(ReferenceProvider):
    name = "second-form"
    form = "composed"

    def forms(self) -> tuple[ReferenceProvider, ...]:
        other = OneBit()
        other.form = "fused"  # type: ignore[attr-defined]
        return (self, other)


class Partial(StubProvider):
    """One operator of its own and nothing else: the rest refuses."""

    name = "partial"

    def hc_split_sinkhorn_fwd(
        self, h: Tensor, contract: LayerContract | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        return ReferenceProvider().hc_split_sinkhorn_fwd(h, contract)


class NoProvider:
    name = "no-provider"


class CannotBeMade(ReferenceProvider):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class SaysNothingOfItself(ReferenceProvider):
    name = "silent"

    def provenance(self) -> dict[str, Any]:
        return {"requested_backend": "silent"}


class OtherDevice(ReferenceProvider):
    name = "other-device"

    def capabilities(self) -> dict[str, Any]:
        return super().capabilities() | {"devices": ["cuda"]}
