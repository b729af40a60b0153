"""The modules of a model by the name a trace gives them, which wrappers do not change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from samebits.models.sites import SITES
from samebits.verify.trace.events import ROOT

_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
COMPILED = "_orig_mod"


@dataclass(frozen=True)
class Named:
    module: nn.Module
    path: str
    cls: str
    opaque: bool
    """A compiled or scripted module: its boundary is recorded, nothing inside."""
    managed: bool = False
    """See :func:`is_managed`."""


def named_modules(root: nn.Module, prefix: str = "") -> Iterator[Named]:
    """Every module once, under its first name, parents first. A wrapper (DDP, checkpointing, FSDP) is left out: what it wraps has
    the name that it has without the wrapper. Raises TypeError for nn.DataParallel, whose replicas run no hooks of the model."""
    yield from _walk(root, prefix, set())


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[Named]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, nn.DataParallel):
        raise TypeError(
            f"{path or 'the model'} is nn.DataParallel: its replicas live in threads, without hooks; trace its .module, or use "
            "DistributedDataParallel"
        )
    inner = _wrapped(module)
    if inner is not None:
        yield from _walk(inner, path, seen)
        return
    opaque = COMPILED in module._modules or is_compiled_in_place(module) or _is_script(module)
    yield Named(module, path or ROOT, class_name(module), opaque, is_managed(module))
    if not opaque:
        for name, child in module.named_children():
            yield from _walk(child, f"{path}.{name}" if path else name, seen)


def class_name(module: nn.Module) -> str:
    """Of the user's class: compilation and FSDP2 put another one in front of it."""
    kind = type(module._modules.get(COMPILED) or module)
    names = [base.__name__ for base in kind.__mro__]
    return names[2] if names[1:2] == ["FSDPModule"] and len(names) > 2 else names[0]


def is_compiled_in_place(module: nn.Module) -> bool:
    """``module.compile()`` was called: its hooks run inside the compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_managed(module: nn.Module) -> bool:
    """FSDP2 swaps the parameters of this module in and out, behind the back of their version counters."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_passed_over(module: nn.Module) -> bool:
    """Of a patched model, and usually run as a part of another operation: it runs by itself only because somebody watches it."""
    sites = vars(module).get(SITES, {}).values()
    return bool(sites) and all(site.inside for site in sites)


def _wrapped(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module
    return next((module._modules[name] for name in _WRAPPED if name in module._modules), None)


def _is_script(module: nn.Module) -> bool:
    return any(base.__name__ in ("ScriptModule", "RecursiveScriptModule") for base in type(module).__mro__)
