"""DeepSeek's TileKernels as a peer, where it is installed (``tile_kernels``, ``tilelang``). Its tensors are
(batch, tokens, 4, hidden); the values of DeepSeek-V4 differ from its defaults."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from samebits.bench.work import LeftOut

POST_FACTOR, ITERATIONS = 2.0, 20
MODULES = ("tile_kernels", "tilelang")
"""What must be installed; ``Peer.needs`` of these peers."""


def _module(name: str) -> Any:
    """A module under ``tile_kernels`` without running the package's own ``__init__``, which needs an older tilelang."""
    if "tile_kernels" not in sys.modules:
        found = importlib.util.find_spec("tile_kernels")
        if found is None or not found.submodule_search_locations or importlib.util.find_spec("tilelang") is None:
            raise LeftOut(f"{' and '.join(MODULES)} are not installed")
        root = list(found.submodule_search_locations)
        for package, folders in (
            ("tile_kernels", root),
            ("tile_kernels.modeling", [f"{folder}/modeling" for folder in root]),
        ):
            stub = types.ModuleType(package)
            stub.__path__ = folders
            sys.modules[package] = stub
    return importlib.import_module(f"tile_kernels.{name}")


def _functions() -> Any:
    return _module("modeling.mhc.functional")


def pre(residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, post, comb). Fused where gradients are disabled. ``gain`` is its scale (3,), or (24,): that 4, 4, 16 times."""
    mhc_pre: Callable[..., Any] = _functions().mhc_pre
    hidden, (post, comb) = mhc_pre(
        residual[None], weight, gain if len(gain) == 3 else gain[0:9:4].contiguous(), bias,
        norm_eps=eps, post_mult_value=POST_FACTOR, sinkhorn_repeat=ITERATIONS,
    )  # fmt: skip
    return hidden[0], post[0].squeeze(-1), comb[0]


def head(residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor]:
    """The final collapse; ``gain`` (4,) repeats its one scale."""
    hidden: Tensor = _functions().mhc_head(residual[None], weight, gain[:1], bias, norm_eps=eps)
    return (hidden[0],)


def post(residual: Tensor, sublayer: Tensor, comb: Tensor, weights: Tensor) -> tuple[Tensor]:
    """The streams after a sublayer."""
    streams: Tensor = _functions().mhc_post(sublayer[None], residual[None], weights[None, ..., None], comb[None])
    return (streams[0],)
