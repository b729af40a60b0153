"""Every module boundary of one run, in the order of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known

_PARTS = {known.HYPER_CONNECTION: ("post", "comb", "collapsed"), "DeepseekV4Attention": ("output", "weights")}


def boundaries(module: nn.Module, run: Callable[[], None]) -> dict[str, Tensor]:
    """What each submodule returned, by name; streams that enter a hyper-connection as ``<name>.streams``.

    Those streams are what the layer computed inline (the post mix of the site before), which no submodule returns.
    A module that runs again gets ``#2`` after its name. The outermost module is ``layer``.
    """
    record: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def keep(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            counts[name] += 1
            record[name if counts[name] == 1 else f"{name}#{counts[name]}"] = value.detach()

    def after(name: str) -> Callable[..., None]:
        def hook(member: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, tuple):
                keep(name, output)
                return
            parts = _PARTS.get(type(member).__name__, tuple(str(i) for i in range(len(output))))
            for part, value in zip(parts, output, strict=True):
                keep(f"{name}.{part}", value)

        return hook

    def before(name: str) -> Callable[..., None]:
        return lambda member, args: keep(f"{name}.streams", args[0])

    handles = []
    for name, member in module.named_modules():
        handles.append(member.register_forward_hook(after(name or "layer")))
        if type(member).__name__ == known.HYPER_CONNECTION:
            handles.append(member.register_forward_pre_hook(before(name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return record
