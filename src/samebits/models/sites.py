"""Call sites of a patched model: where an operator of ours runs, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
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
    family: Mapping[str, str] | None = None
    """Operator to contract, where a call runs several operators and takes all of theirs."""
    hits: int = 0

    def hit(self) -> dict[str, Any]:
        """Count a call, and the options that it is made with."""
        if not torch.compiler.is_compiling():  # traced once, run often: a count would say nothing
            self.hits += 1
        return {"contract": self.family or self.contract, "backend": self.backend}


@dataclass(frozen=True)
class SiteReport:
    name: str
    """Of the module in the model; of a line inside a module's forward, the module's name and one of ours."""
    operator: str
    contract: str
    hits: int
    """Eager calls since the patch; compiled ones are not counted."""


@dataclass(frozen=True)
class Patched:
    """What is in place in a patched model, as of the moment it was asked."""

    release: str
    """Of what the model's class comes from: its name and version."""
    contracts: dict[str, str]
    backend: str | None
    sites: tuple[SiteReport, ...]
    adapters: tuple[str, ...] = ()
    """Linears that an adapter stands around: their own product is ours, what the adapter adds is its own."""

    @property
    def hits(self) -> dict[str, int]:
        return {site.name: site.hits for site in self.sites}

    @property
    def unused(self) -> tuple[str, ...]:
        """Sites that have not run."""
        return tuple(site.name for site in self.sites if not site.hits)
