"""The contract of one hyper-connection layer: what a provider must agree to before a byte is compared."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal

Placement = Literal["replicated", "tp-sharded", "cp-token-sharded"]
FusionMode = Literal["unfused", "fused-pre-norm"]
Trainability = Literal["full", "mixer-frozen"]

PLACEMENTS: tuple[Placement, ...] = ("replicated", "tp-sharded", "cp-token-sharded")
FUSION_MODES: tuple[FusionMode, ...] = ("unfused", "fused-pre-norm")
TRAINABILITIES: tuple[Trainability, ...] = ("full", "mixer-frozen")

SCHEMA = "p1-mhc-layer-v1"
PROFILE = "oracle-fp32-mhc-v1"

_FROZEN: dict[str, object] = {"hc_mult": 4, "sinkhorn_iters": 20, "mhc_eps": 1e-6, "rmsnorm_eps": 1e-6}
_NOT_IN_THE_FINGERPRINT = ("layer_index", "placement")
"""They say where a layer stands and where its tensors lie, not what its numbers are."""


@dataclass(frozen=True)
class LayerContract:
    """Shape, constants and mode of one layer. :meth:`validate` refuses what the numeric profile does not define."""

    hidden: int
    hc_mult: int = 4
    controller_n: int = 24
    sinkhorn_iters: int = 20
    mhc_eps: float = 1e-6
    rmsnorm_eps: float = 1e-6
    layer_index: int = 3
    placement: Placement = "replicated"
    fusion_mode: FusionMode = "unfused"
    trainability: Trainability = "full"
    schema_version: str = SCHEMA
    numeric_profile: str = PROFILE

    @property
    def controller_k(self) -> int:
        """Width of the controller's input: the streams of a token, flattened stream-major."""
        return self.hc_mult * self.hidden

    @property
    def mixer_frozen(self) -> bool:
        return self.trainability == "mixer-frozen"

    def validate(self) -> None:
        """Raises ValueError that names the field and what it may be."""
        for name, value in _FROZEN.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} is {getattr(self, name)!r}; the profile {PROFILE} fixes it at {value!r}")
        outputs = 2 * self.hc_mult + self.hc_mult**2
        if self.controller_n != outputs:
            raise ValueError(f"controller_n is {self.controller_n}; 2 H + H * H is {outputs} for H = {self.hc_mult}")
        if self.hidden < 1:
            raise ValueError(f"hidden is {self.hidden}; it must be at least 1")
        if self.layer_index < 0:
            raise ValueError(f"layer_index is {self.layer_index}; it must be at least 0")
        choices: dict[str, tuple[str, ...]] = {
            "placement": PLACEMENTS,
            "fusion_mode": FUSION_MODES,
            "trainability": TRAINABILITIES,
            "schema_version": (SCHEMA,),
            "numeric_profile": (PROFILE,),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(map(repr, known))}")

    def fingerprint(self) -> str:
        """SHA-256 over every field that decides a bit, the numeric profile included."""
        covered = (f.name for f in dataclasses.fields(self) if f.name not in _NOT_IN_THE_FINGERPRINT)
        text = "\n".join(f"{name}={getattr(self, name)!r}" for name in sorted(covered))
        return hashlib.sha256(text.encode()).hexdigest()
