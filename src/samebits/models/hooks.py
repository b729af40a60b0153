"""Members of a model that we run as a part of something else: whoever put a hook on them still sees what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from samebits.exact.compare import same_bits


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module is more than its forward."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or torch_module._has_any_global_hook()


def show(module: nn.Module, name: str, given: Callable[[], Tensor]) -> None:
    """Call a module for the sake of its hooks alone, if it has any; ``given`` makes what it takes.

    Hooks that say of themselves that they only look (an attribute ``samebits_only_looks`` that is true, as those of a trace) are
    taken at their word; for others the module runs twice and the results are compared, which waits for the device.

    Raises:
        RuntimeError: a hook wants to change what the module takes or returns, or its gradients, which would be lost.
    """
    if not hooked(module):
        return
    backward = module._backward_hooks or module._backward_pre_hooks
    forward = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    everywhere = torch_module._has_any_global_hook()
    with torch.no_grad():
        taken = given()
        if not (backward or everywhere) and all(getattr(hook, "samebits_only_looks", False) for hook in forward):
            module(taken)
            return
        expected: Any = module.forward(taken)
        changed = bool(backward) or not same_bits(module(taken), expected)
    if changed:
        raise RuntimeError(
            f"{name}: a hook changes what this module takes or returns (a backward hook does, too), but samebits runs it as a "
            f"part of another operation; hooks on it may only look. Use a hook on the module around it, or samebits.unpatch "
            f"the model"
        )
