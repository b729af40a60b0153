"""Digests that are known already: what was an output a moment ago and is an input now is not read a second time.

A tensor is known by its storage, by where it lies in it (address, shape, strides, dtype) and by torch's count of in-place writes.
A storage is held by a weak reference, which does not keep its memory but does keep its identity from being used again, so a new
tensor at an old address is a new one. Tensors without a count (made in inference mode) and tensor classes of somebody's own are
never known. A write that torch does not count is not seen here; the README says which those are.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.verify.trace.layout import Layout
from samebits.verify.trace.pending import Reading

PRUNE = 4096
"""Storages after which those that are gone are dropped; from then on at twice as many as were left."""
Place = tuple[Any, ...]
"""Identity of a storage first, then what of it a tensor shows, and with which digests it was asked for."""


class Known:
    """The last digest of every tensor that was read. Safe to use from several threads."""

    def __init__(self) -> None:
        self.readings: dict[Place, tuple[int, int, Reading]] = {}
        """The last one of each place: count of writes, position in the trace, digests."""
        self._alive: dict[int, StorageWeakRef] = {}
        self._prune_at = PRUNE
        self._lock = threading.Lock()

    def find(self, place: Place, version: int, after: int) -> Reading | None:
        """The digests of what lies there now, where they were taken behind position ``after``."""
        known = self.readings.get(place)
        if known is None or known[0] != version or known[1] <= after or known[2].note:
            return None
        return known[2]

    def add(self, tensor: Tensor, place: Place, position: int, reading: Reading) -> None:
        """``tensor``, which lies at ``place``, was read at ``position``."""
        with self._lock:
            if place[0] not in self._alive:
                if len(self._alive) >= self._prune_at:
                    self._prune()
                self._alive[place[0]] = StorageWeakRef(tensor.untyped_storage())
            self.readings[place] = (tensor._version, position, reading)

    def _prune(self) -> None:
        self._alive = {at: alive for at, alive in self._alive.items() if not alive.expired()}
        self._prune_at = max(PRUNE, 2 * len(self._alive))
        for place in [place for place in self.readings if place[0] not in self._alive]:
            del self.readings[place]


def place_of(tensor: Tensor, layout: Layout, lead: int = 0, axis: int = 0) -> Place:
    """Where a tensor lies, the writes to which are counted.

    A digest is of bytes: dense tensors of the same bytes are one, whatever their shape and dtype, where no rows are asked for.
    """
    place = tensor.untyped_storage()._cdata, tensor.data_ptr()
    return (*place, layout.key, lead, axis) if lead else (*place, layout.view)
