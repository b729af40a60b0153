"""Members of a model that we run as a part of something else: whoever put a hook on them still sees what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from samebits.exact.compare import same_bits


def show(module: nn.Module, name: str, given: Callable[[], Tensor]) -> None:
    """Call a module for the sake of its hooks alone, if it has any; ``given`` makes what it takes.

    Raises:
        RuntimeError: a hook wants to change what the module takes or returns, or its gradients, which would be lost.
    """
    backward = module._backward_hooks or module._backward_pre_hooks
    if not (backward or module._forward_hooks or module._forward_pre_hooks or torch_module._has_any_global_hook()):
        return
    with torch.no_grad():
        taken = given()
        expected: Any = module.forward(taken)
        changed = bool(backward) or not same_bits(module(taken), expected)
    if changed:
        raise RuntimeError(
            f"{name}: a hook changes what this module takes or returns (a backward hook does, too), but samebits runs it as a "
            f"part of another operation; hooks on it may only look. Use a hook on the module around it, or samebits.unpatch "
            f"the model"
        )
