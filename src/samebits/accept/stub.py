"""A provider that has nothing. What acceptance says of it is what it says of whatever is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samebits.accept.contract import FUSION_MODES, PROFILE, TRAINABILITIES
from samebits.accept.provider import METHODS


class StubProvider:
    """Declares every mode and raises NotImplementedError in every operator: nothing falls back to anything."""

    name = "stub"
    numeric_profile = PROFILE

    def capabilities(self) -> dict[str, Any]:
        return {
            "backend": "none",
            "geometry": ["one-row", "packed"],
            "devices": ["cpu", "cuda"],
            "fusion_modes": list(FUSION_MODES),
            "trainability": list(TRAINABILITIES),
            "placements": ["replicated"],
            "implemented_operators": [],
        }

    def provenance(self) -> dict[str, Any]:
        return {
            "requested_backend": self.name,
            "actual_backend": "none",
            "numeric_profile": self.numeric_profile,
            "torch_version": torch.__version__,
        }


def _refusing(method: str) -> Callable[..., Any]:
    def refuse(self: StubProvider, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.name} has no {method}")

    refuse.__name__ = method
    return refuse


for _method in METHODS:
    if not hasattr(StubProvider, _method):
        setattr(StubProvider, _method, _refusing(_method))
