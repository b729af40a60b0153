"""Digests that are known already: what was an output a moment ago and is an input now is not read a second time.

A tensor is known by its storage, by where it lies in it (address, shape, strides, dtype) and by torch's count of in-place writes.
A storage is held by a weak reference, which does not keep its memory but does keep its identity from being used again, so a new
tensor at an old address is a new one. Tensors without a count (made in inference mode) and tensor classes of somebody's own are
never known. A write that torch does not count is not seen here; the README says which those are.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.verify.trace.pending import Reading

PRUNE = 4096
"""Storages after which those that are gone are dropped; from then on at twice as many as were left."""
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

View = tuple[Any, ...]
"""What of a storage a tensor shows, and which digests were asked for."""


@dataclass
class _Storage:
    alive: StorageWeakRef
    readings: dict[View, tuple[int, int, Reading]] = field(default_factory=dict)
    """The last reading of each view: count of writes, position in the trace, digests."""


class Known:
    """The last digest of every tensor that was read. Safe to use from several threads."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._prune_at = PRUNE
        self._lock = threading.Lock()

    def find(self, tensor: Tensor, lead: int, axis: int, after: int) -> Reading | None:
        """The digests of this tensor as it is now, where they were taken behind position ``after``."""
        if not _has_count(tensor):
            return None
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        version, position, reading = storage.readings.get(_view(tensor, lead, axis), (-1, -1, None))
        return reading if version == tensor._version and position > after else None

    def add(self, tensor: Tensor, lead: int, axis: int, position: int, reading: Reading) -> None:
        """``tensor`` was read at ``position``, and nothing has written to it since."""
        if not _has_count(tensor):
            return
        held = tensor.untyped_storage()
        with self._lock:
            storage = self._storages.get(held._cdata)
            if storage is None:
                if len(self._storages) >= self._prune_at:
                    self._storages = {at: s for at, s in self._storages.items() if not s.alive.expired()}
                    self._prune_at = max(PRUNE, 2 * len(self._storages))
                storage = self._storages[held._cdata] = _Storage(StorageWeakRef(held))
            storage.readings[_view(tensor, lead, axis)] = (tensor._version, position, reading)


def _has_count(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and not tensor.is_inference()


def _view(tensor: Tensor, lead: int, axis: int) -> View:
    marks = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *marks, lead, axis)
