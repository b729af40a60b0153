"""Every kernel that a call of ``attention`` reaches: those for Hopper under every plan, those of Triton as they run by default."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace

from samebits.audit.build import Build
from samebits.sequence_ops.attention.hopper import ARCH

TRITON_ARCHES = (80, 90, 100)
"""Their plans follow the architecture."""


def builds(backend: str) -> tuple[Build, ...]:
    """For the audit. ImportError: the backend is not installed."""
    home = __package__
    if backend == "cuda":
        modules = [importlib.import_module(f"{home}.{name}") for name in ("cuda", "cuda_backward")]
        return _merged(replace(build, arches=(ARCH,)) for module in modules for build in module.builds())
    modules = [importlib.import_module(f"{home}.{name}") for name in ("triton", "triton_backward")]
    return _merged(
        replace(build, arches=(arch,)) for arch in TRITON_ARCHES for module in modules for build in module.builds(arch)
    )


def _merged(found: Iterable[Build]) -> tuple[Build, ...]:
    """Each kernel once, with every contract that it serves and every architecture that launches it."""
    kernels: dict[object, Build] = {}
    for build in found:
        known = kernels.setdefault(build.kernel, build)
        contracts = tuple(dict.fromkeys((*known.contracts, *build.contracts)))
        arches = tuple(sorted({*known.arches, *build.arches}))
        kernels[build.kernel] = replace(known, contracts=contracts, arches=arches)
    return tuple(kernels.values())
