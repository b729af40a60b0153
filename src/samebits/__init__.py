"""samebits: the same bits in training and inference, and a workbench that proves it.

``import samebits`` loads neither torch nor triton; an operator loads at its first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from samebits import registry as _registry

__version__ = "0.1.0"

_HOMES = {
    "policy": "samebits.dispatch",
    "force_plan": "samebits.dispatch",
    "UnsupportedError": "samebits.dispatch",
    "bits_of": "samebits.exact.elementary",
    "explain": "samebits.explaining",
    "segments": "samebits.segmentation",
    "Segments": "samebits.segmentation",
    "adaln_indices": "samebits.ops.adaln_row_gather.indices",
    "linear_group": "samebits.ops.linear.grouped",
    "rope_3axis_tables": "samebits.ops.rope_3axis.tables",
    "adaln_modulation": "samebits.nn.adaln",
    "final_adaln_out": "samebits.nn.adaln",
    "attention": "samebits.sequence_ops.attention.api",
    "attention_backward": "samebits.sequence_ops.attention.api",
    "check": "samebits.verify",
    "trace": "samebits.verify.trace",
    "drift": "samebits.verify.drift",
    "invariance": "samebits.verify.invariance",
    "accumulate": "samebits.nn",
    "patch": "samebits.models.patching",
    "unpatch": "samebits.models.patching",
    "patched": "samebits.models.patching",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    home = _HOMES.get(name) or _registry.home_of(name)
    if home is None:
        raise AttributeError(f"samebits has no {name!r}; operators: {', '.join(_registry.names())}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_HOMES, *_registry.public_names()})
