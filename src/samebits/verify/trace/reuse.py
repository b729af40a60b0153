"""Digests that are known already: what was an output a moment ago and is an input now is not read a second time.

A tensor is known by its storage, by where it lies in it (address, shape, strides, dtype) and by torch's count of in-place writes.
A storage is held by a weak reference, which does not keep its memory but does keep its identity from being used again, so a new
tensor at an old address is a new one. Tensors without a count (made in inference mode) and tensor classes of somebody's own are
never known. A write that torch does not count is not seen here; the README says which those are.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.verify.trace.layout import Layout
from samebits.verify.trace.pending import Reading

PRUNE = 4096
"""Storages after which those that are gone are dropped; from then on at twice as many as were left."""
Place = tuple[Any, ...]
"""Identity of a storage first, then what of it a tensor shows, and with which digests it was asked for."""
Sight = tuple[int, int, Any]
"""Identity of a storage, address and shape: what tells nearly every tensor from all others and is had at once."""


class Known:
    """The last digest of every tensor that was read. Safe to use from several threads."""

    def __init__(self) -> None:
        self.readings: dict[Place, Reading] = {}
        """The last one of each place."""
        self.seen: dict[Sight, tuple[Layout, Reading]] = {}
        """What was found last by a sight; whether it still holds is for the finder to ask."""
        self.alive: dict[int, StorageWeakRef] = {}
        """The storages that anything is known of, by identity."""
        self._prune_at = PRUNE
        self._lock = threading.Lock()

    def find(self, place: Place, version: int, after: int) -> Reading | None:
        """The digests of what lies there now, where they were taken behind position ``after``."""
        known = self.readings.get(place)
        if known is None or known.version != version or known.position <= after or known.note:
            return None
        return known

    def add(self, tensor: Tensor, place: Place, position: int, reading: Reading) -> None:
        """``tensor``, which lies at ``place``, was read at ``position``."""
        reading.version, reading.position = tensor._version, position
        if place[0] not in self.alive:
            self.adopt(tensor.untyped_storage())
        self.readings[place] = reading

    def adopt(self, storage: UntypedStorage) -> None:
        """Keep the identity of a storage from being used again."""
        with self._lock:
            if len(self.alive) >= self._prune_at:
                self._prune()
            self.alive[storage._cdata] = StorageWeakRef(storage)

    def _prune(self) -> None:
        alive = {at: storage for at, storage in self.alive.items() if not storage.expired()}
        for found in (self.readings, self.seen):
            for place in list(found):
                if place[0] not in alive:
                    del found[place]
        self.alive = alive  # only now may an identity be used again
        self._prune_at = max(PRUNE, 2 * len(alive))


def place_of(tensor: Tensor, layout: Layout, lead: int = 0, axis: int = 0) -> Place:
    """Where a tensor lies, the writes to which are counted.

    A digest is of bytes: dense tensors of the same bytes are one, whatever their shape and dtype, where no rows are asked for.
    """
    place = tensor.untyped_storage()._cdata, tensor.data_ptr()
    return (*place, layout.key, lead, axis) if lead else (*place, layout.view)
