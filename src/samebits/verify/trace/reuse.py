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

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.verify.trace.digest import PLAIN
from samebits.verify.trace.pending import Reading

PRUNE = 4096
"""Storages after which those that are gone are dropped; from then on at twice as many as were left."""
Place = tuple[int, int, tuple[Any, ...]]
"""Identity of the storage, count of writes, and what of the storage a tensor shows with which digests were asked for."""


@dataclass
class _Storage:
    alive: StorageWeakRef
    readings: dict[tuple[Any, ...], tuple[int, int, Reading]] = field(default_factory=dict)
    """The last reading of each view: count of writes, position in the trace, digests."""


class Known:
    """The last digest of every tensor that was read. Safe to use from several threads."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._prune_at = PRUNE
        self._lock = threading.Lock()

    def find(self, place: Place, after: int) -> Reading | None:
        """The digests of what lies there now, where they were taken behind position ``after``."""
        identity, version, view = place
        storage = self._storages.get(identity)
        if storage is None:
            return None
        known = storage.readings.get(view)
        return known[2] if known is not None and known[0] == version and known[1] > after else None

    def add(self, tensor: Tensor, place: Place, position: int, reading: Reading) -> None:
        """``tensor``, which lies at ``place``, was read at ``position``."""
        identity, version, view = place
        with self._lock:
            storage = self._storages.get(identity)
            if storage is None:
                if len(self._storages) >= self._prune_at:
                    self._storages = {at: s for at, s in self._storages.items() if not s.alive.expired()}
                    self._prune_at = max(PRUNE, 2 * len(self._storages))
                storage = self._storages[identity] = _Storage(StorageWeakRef(tensor.untyped_storage()))
            storage.readings[view] = (version, position, reading)


def place_of(tensor: Tensor, lead: int, axis: int) -> Place | None:
    """Where the tensor lies and which version it is; None: nothing counts the writes to it.

    A digest is of bytes: dense tensors of the same bytes are one, whatever their shape and dtype, where no rows are asked for.
    """
    if type(tensor) not in PLAIN or tensor.is_inference():
        return None
    view: tuple[Any, ...]
    if not lead and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        view = (tensor.data_ptr(), tensor.nbytes)
        return tensor.untyped_storage()._cdata, tensor._version, view
    view = (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        lead,
        axis,
    )
    return tensor.untyped_storage()._cdata, tensor._version, view
