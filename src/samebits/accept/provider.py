"""What a provider must offer: the operators of the layer, forward and backward, and what it says about itself.

T tokens, D = hidden, K = 4 D, N = 24; everything is FP32 except r_old, y, hidden, normalized, residual, r_new and the
incoming gradients d_r_new, d_normalized and d_residual, which are BF16. ``saved`` is whatever the provider's own forward
leaves for its own backward. An operator that a provider does not have raises NotImplementedError with the reason: nothing
falls back unseen. A provider that has only some of them inherits from
:class:`~samebits.accept.reference.ReferenceProvider` and names them under ``implemented_operators``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from samebits.accept.batch import Batch
from samebits.accept.contract import LayerContract

OPERATORS = (
    "hc_split_sinkhorn",
    "fp32_gemm_rms",
    "mhc_post",
    "h_aggregate",
    "rmsnorm_residual",
    "fixed_k_gemm",
    "mhc_pre",
)
"""Each has ``<name>_fwd`` and ``<name>_bwd``."""
METHODS = (
    "capabilities",
    "provenance",
    *(f"{name}_{direction}" for name in OPERATORS for direction in ("fwd", "bwd")),
    "mhc_pre_rmsnorm_fused_fwd",
)
CAPABILITIES = ("backend", "geometry", "devices", "fusion_modes", "trainability", "placements")
"""What ``capabilities()`` must say; ``implemented_operators`` is optional."""
PROVENANCE = ("requested_backend", "actual_backend", "numeric_profile", "torch_version")


@dataclass(frozen=True)
class PreSaved:
    """What the composite ``mhc_pre`` keeps. The first four are recorded as boundaries."""

    p: Tensor
    """(T, N) controller projection."""
    r: Tensor
    """(T,) reciprocal RMS of the streams."""
    h: Tensor
    """(T, N) controller outputs, input of the split."""
    pre: Tensor
    """(T, 4) collapse weights."""
    post: Tensor
    c: Tensor
    gemm: Any = None
    """What ``fp32_gemm_rms_fwd`` saved."""
    sinkhorn: Any = None
    """What ``hc_split_sinkhorn_fwd`` saved."""
    own: Any = None
    """Whatever else the provider's own composite needs for its backward."""


@dataclass(frozen=True)
class FusedSaved:
    """What ``mhc_pre_rmsnorm_fused_fwd`` keeps: the saved parts of the two operators that it stands for."""

    pre: PreSaved
    norm: Any


@dataclass(frozen=True)
class PreGrads:
    """Gradients of the composite ``mhc_pre``. Those of the controller are None in a frozen mixer, not zeros."""

    d_r_old: Tensor
    """(T, 4, D): collapse leg + controller leg."""
    d_controller_weight: Tensor | None
    d_alpha_pre: Tensor | None
    d_alpha_post: Tensor | None
    d_alpha_res: Tensor | None
    d_bias: Tensor | None
    merged: bool = False
    """Whether the leg of ``mhc_post`` was already added to d_r_old, as its last addition."""
    d_gamma: Tensor | None = None
    """Of a backward that goes through the norm as well: recorded as ``grad.d_gamma`` in place of the norm's own."""


class Provider(Protocol):
    """Every method of ``METHODS``; the argument order is that of the published layer."""

    name: str
    numeric_profile: str

    def capabilities(self) -> Mapping[str, Any]: ...

    def provenance(self) -> Mapping[str, Any]: ...

    def hc_split_sinkhorn_fwd(
        self, h: Tensor, contract: LayerContract | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """h (T, 24) to (pre (T, 4), post (T, 4), c (T, 4, 4), saved)."""

    def hc_split_sinkhorn_bwd(self, d_pre: Tensor, d_post: Tensor, d_c: Tensor, saved: Any) -> Tensor:
        """d_h (T, 24)."""

    def fp32_gemm_rms_fwd(self, x_flat: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        """x_flat (T, K) FP32 and weight (N, K) to (p (T, N), r (T,), saved)."""

    def fp32_gemm_rms_bwd(
        self, dp: Tensor, dr: Tensor, x_flat: Tensor, weight: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        """(d_x (T, K), d_weight (N, K))."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        """r_new (T, 4, D) BF16; the mix contracts over the first index of c."""

    def mhc_post_bwd(
        self, d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(d_r_old (T, 4, D), d_y (T, D), d_c (T, 4, 4), d_post (T, 4))."""

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        """hidden (T, D) BF16."""

    def h_aggregate_bwd(self, d_hidden: Tensor, pre: Tensor, r_old: Tensor) -> tuple[Tensor, Tensor]:
        """d_hidden (T, D) FP32 to (d_r_old (T, 4, D), d_pre (T, 4))."""

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Any]:
        """x (T, D) BF16 to (normalized (T, D) BF16, residual: a copy of x, saved)."""

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor]:
        """(d_x (T, D), d_gamma (D,))."""

    def fixed_k_gemm_fwd(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (M, K) and weight (N, K), FP32, to (M, N): a left fold over ascending k."""

    def fixed_k_gemm_bwd(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(d_x (M, K): a left fold over n, d_weight (N, K): a left fold over m)."""

    def mhc_pre_fwd(self, batch: Batch, ops: Provider) -> tuple[Tensor, Tensor, Tensor, Tensor, PreSaved]:
        """(hidden (T, D), pre (T, 4), post (T, 4), c (T, 4, 4), saved), composed of the operators of ``ops``."""

    def mhc_pre_bwd(
        self, d_hidden: Tensor, d_post: Tensor, d_c: Tensor, batch: Batch, saved: PreSaved, ops: Provider
    ) -> PreGrads:
        """Gradients of the streams and, unless the mixer is frozen, of the controller."""

    def mhc_pre_rmsnorm_fused_fwd(
        self, batch: Batch, ops: Provider
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, FusedSaved]:
        """(hidden, normalized, residual, post, c, saved), in bytes the two operators one after the other."""


def check_capability(provider: Provider, contract: LayerContract, rows: int) -> None:
    """Raises NotImplementedError where the provider does not declare a mode of the contract, or has another profile."""
    if provider.numeric_profile != contract.numeric_profile:
        raise NotImplementedError(
            f"{provider.name} has the numeric profile {provider.numeric_profile!r}, "
            f"the contract is {contract.numeric_profile!r}"
        )
    declared = provider.capabilities()
    for key, value in (
        ("fusion_modes", contract.fusion_mode),
        ("trainability", contract.trainability),
        ("placements", contract.placement),
        ("geometry", "one-row" if rows == 1 else "packed"),
    ):
        if value not in declared[key]:
            known = ", ".join(declared[key]) or "nothing"
            raise NotImplementedError(f"{provider.name} does not declare {key} {value!r}, only {known}")
