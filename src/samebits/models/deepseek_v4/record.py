"""Every module boundary of one run, in the order of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known

_PARTS = {known.HYPER_CONNECTION: ("post", "comb", "collapsed"), "DeepseekV4Attention": ("output", "weights")}
_TAKES_STREAMS = (known.HYPER_CONNECTION, known.HYPER_HEAD)


@dataclass
class Record:
    """``boundaries`` in the order of the run; ``inputs`` are those of the norms, which are somebody else's boundary too."""

    boundaries: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    """Boundary to the class of the module that returned it."""

    def __getitem__(self, name: str) -> Tensor:
        return self.boundaries[name] if name in self.boundaries else self.inputs[name]

    def __contains__(self, name: str) -> bool:
        return name in self.boundaries or name in self.inputs


def record(model: nn.Module, run: Callable[[], Tensor]) -> Record:
    """What each submodule returned, by name; streams that enter a hyper-connection or the head as ``<name>.streams``.

    Those streams are what the layer computed inline (the post mix of the site before), which no submodule returns. What a
    norm takes is ``<name>.input``. A module that runs again gets ``#2`` after its name. The result of the run is ``logits``.
    """
    found = Record()
    counts: Counter[str] = Counter()

    def keep(name: str, value: Any, member: nn.Module, into: dict[str, Tensor]) -> None:
        if isinstance(value, Tensor):
            counts[name] += 1
            key = name if counts[name] == 1 else f"{name}#{counts[name]}"
            into[key] = value.detach()
            found.classes[key] = type(member).__name__

    def after(name: str) -> Callable[..., None]:
        def hook(member: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, tuple):
                keep(name, output, member, found.boundaries)
                return
            parts = _PARTS.get(type(member).__name__, tuple(str(i) for i in range(len(output))))
            for part, value in zip(parts, output, strict=True):
                keep(f"{name}.{part}", value, member, found.boundaries)

        return hook

    def before(name: str, into: dict[str, Tensor]) -> Callable[..., None]:
        return lambda member, args: keep(name, args[0], member, into)

    handles = []
    for path, member in model.named_modules():
        name = short(path)
        if not name:
            continue
        handles.append(member.register_forward_hook(after(name)))
        if type(member).__name__ in _TAKES_STREAMS:
            handles.append(member.register_forward_pre_hook(before(f"{name}.streams", found.boundaries)))
        elif type(member).__name__ == known.RMSNORM:
            handles.append(member.register_forward_pre_hook(before(f"{name}.input", found.inputs)))
    try:
        with torch.no_grad():
            found.boundaries["logits"] = run().detach()
    finally:
        for handle in handles:
            handle.remove()
    found.classes["logits"] = type(model).__name__
    return found


def short(path: str) -> str:
    """A module's name without the ``model.`` that every one of them has; empty for the models themselves."""
    return "" if path == "model" else path.removeprefix("model.")
