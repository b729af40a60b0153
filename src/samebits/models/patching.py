"""``samebits.patch``: the operators at every call site of a model that we know, and out of it again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from samebits.models.sites import Patched

_MINIMAX_H3 = "diffusers.models.transformers.transformer_minimax_h3"


def patch(model: nn.Module, contracts: str | Mapping[str, str] = "fast", *, backend: str | None = None) -> Patched:
    """Run a model with our operators at every place that they cover; only this model changes.

    Args:
        model: DeepSeek-V4 of ``transformers`` (see :func:`samebits.models.deepseek_v4.patch`) or MiniMax-H3 of ``diffusers``
            (see :func:`samebits.models.minimax_h3.patching.patch`); one layer or block, or any module around them.
        contracts: ``"fast"``, ``"published"``, or operator name to contract name. Both ends of a stack must use the same.
        backend: of every operator; None takes the first that accepts the call.

    Returns:
        What is in place, as :func:`patched`.

    Raises:
        ImportError, TypeError, RuntimeError, ValueError: as the function of the model says.
    """
    found: Patched = _home(model).patch(model, contracts, backend=backend)
    return found


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`. RuntimeError: the model is not patched."""
    _home(model).unpatch(model)


def patched(model: nn.Module) -> Patched:
    """The sites of a patched model, their contracts, and how often each has run. RuntimeError: it is not patched."""
    found: Patched = _home(model).patched(model)
    return found


def _home(model: nn.Module) -> Any:
    """What knows the model. A class that was never loaded is in no model, so nothing is imported to find out."""
    code = sys.modules.get(_MINIMAX_H3)
    if code is not None:
        kinds = (code.MiniMaxH3Transformer3DModel, code.MiniMaxH3TransformerBlock)
        if any(isinstance(member, kinds) for member in model.modules()):
            from samebits.models.minimax_h3 import patching

            return patching
    from samebits.models.deepseek_v4 import patching as deepseek

    return deepseek
