"""Digests of parameters and buffers, once per version."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from samebits.verify.trace.digest import PLAIN
from samebits.verify.trace.events import ROOT, Event, TensorRecord
from samebits.verify.trace.names import COMPILED, Named
from samebits.verify.trace.recorder import Recorder


class Parameters:
    """What each parameter and buffer was when it was last looked at.

    A version is a tensor object, its address and torch's count of in-place writes. A kernel that writes a parameter without
    telling torch is not seen here. Two kinds are read at every call of their module, because the count says nothing about them:
    buffers (torch's own batch norm writes its statistics uncounted), and parameters under FSDP2, which refills the same object.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._before: dict[int, Any] = {}
        """By identity of a module: the versions of its parameters when they were last looked at."""
        self._records: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Any]] = {}

    def look(self, modules: Iterable[Named], calling: Named, managed: bool) -> None:
        """Record what is new among the modules' own parameters and buffers, in front of a call of ``calling``."""
        for named in modules:
            module = named.module
            if not module._buffers and not named.opaque:
                if not module._parameters:
                    continue
                if not (managed or named.managed):
                    if self._is_as_before(module):
                        continue
                    self._before[id(module)] = _versions(module)
            called = named is calling
            for name, tensor in own_tensors(named):
                again = called and (managed or named.managed or not isinstance(tensor, nn.Parameter))
                self._look(name, tensor, again)

    def _is_as_before(self, module: nn.Module) -> bool:
        """None of its parameters is another one or was written to. Asked at every call of every module, so it makes nothing."""
        before, now = self._before.get(id(module)), module._parameters
        if before is None or len(before) != len(now):
            return False
        for name, reference, at, version in before:
            parameter = now.get(name)
            if parameter is None:
                if reference is not None or name not in now:
                    return False
            elif (
                reference is None
                or reference() is not parameter
                or parameter.data_ptr() != at
                or parameter._version != version
            ):
                return False
        return True

    def _look(self, name: str, tensor: Tensor, again: bool) -> None:
        at = tensor.data_ptr() if _has_data(tensor) else 0
        key = (id(tensor), at, 0 if tensor.is_inference() else tensor._version)
        known = self._records.get(key)
        fresh = known is None or known[0]() is not tensor or again
        if not fresh and self._seen.get(name) == key:
            return
        self._seen[name] = key
        event = self._recorder.event("parameter", self._recorder.phase(), name, type(tensor).__name__)
        if fresh:
            keep, after = self._recorder.options.keeps(name), event.start if again else -1
            found = self._recorder.records(event, ((name, tensor),), rows=False, keep=keep, after=after)
            self._records[key] = (weakref.ref(tensor), found)
        else:
            assert known is not None
            found = known[1]  # the same tensor under another name
        event.outputs = found
        self._recorder.emit(event)


def without_repetitions(events: list[Event]) -> list[Event]:
    """A parameter that was read again and had not changed is no further version. Shards and gathered tensors count apart."""
    last: dict[tuple[str, bool], TensorRecord] = {}
    kept = []
    for event in events:
        if event.kind == "parameter":
            record = event.outputs[0]
            before = last.get((event.path, record.is_shard))
            if before is not None and record.digest is not None and _same(before, record):
                continue
            last[event.path, record.is_shard] = record
        kept.append(event)
    return kept


def _same(a: TensorRecord, b: TensorRecord) -> bool:
    return (a.digest, a.dtype, a.shape) == (b.digest, b.dtype, b.shape)


def own_tensors(named: Named) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself; of an opaque module all below it, since nothing inside is recorded."""
    prefix = "" if named.path == ROOT else f"{named.path}."
    if named.opaque:
        inner: nn.Module = named.module._modules.get(COMPILED) or named.module
        parts = (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False))
        return [(prefix + name, tensor) for name, tensor in parts]
    direct = (*named.module._parameters.items(), *named.module._buffers.items())
    return [(prefix + name, tensor) for name, tensor in direct if tensor is not None]


def _versions(module: nn.Module) -> list[tuple[str, Any, int, int]] | None:
    """Names, weak references, addresses and counts of writes of a module's parameters. None: something is there that is no plain
    parameter."""
    found: list[tuple[str, Any, int, int]] = []
    for name, parameter in module._parameters.items():
        if parameter is None:
            found.append((name, None, 0, 0))
        elif type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_inference():
            return None
        else:
            found.append((name, weakref.ref(parameter), parameter.data_ptr(), parameter._version))
    return found


def _has_data(tensor: Tensor) -> bool:
    if type(tensor) in PLAIN:
        return tensor.layout is torch.strided
    return type(tensor).__name__ not in ("DTensor", "FakeTensor") and not tensor.is_sparse
