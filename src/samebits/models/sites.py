"""Call sites of a patched model: where an operator of ours runs, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SITES = "samebits_sites"
"""Attribute of a patched module: its call sites by name."""


@dataclass
class Site:
    """One place of the model where an operator of ours runs."""

    name: str
    operator: str
    contract: str
    backend: str | None
    inside: bool = False
    """It usually runs as a part of another site, and by itself only where somebody calls the module alone."""
    hits: int = 0

    def hit(self) -> dict[str, Any]:
        """Count a call, and the options that it is made with."""
        if not torch.compiler.is_compiling():  # traced once, run often: a count would say nothing
            self.hits += 1
        return {"contract": self.contract, "backend": self.backend}


@dataclass(frozen=True)
class SiteReport:
    name: str
    """Of the module in the model; of a line inside a module's forward, the module's name and one of ours."""
    operator: str
    contract: str
    hits: int
    """Eager calls since the patch; compiled ones are not counted."""
