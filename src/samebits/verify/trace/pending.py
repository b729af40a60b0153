"""Digests on their way: what was launched on the devices and is read back once, so that recording never waits for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samebits.verify.trace import digest, tree
from samebits.verify.trace.events import TensorRecord
from samebits.verify.trace.tree import Slabs, Vectors

BOUND = 64 << 20
"""Bytes in flight on all devices, after which everything is read back: the one place that waits. A tensor takes at most 16 KiB, a
row as much as a tensor of its size."""


@dataclass(eq=False, slots=True)
class Reading:
    """One tensor as it was read: its sums on their way, and who waits for them; later the digests."""

    whole: Vectors | None
    rows: Vectors | None
    size: int
    """Bytes of the tensor."""
    width: int
    """Bytes of a row."""
    records: list[TensorRecord] = field(default_factory=list)
    digests: tuple[str, str | None] | None = None
    """Of the tensor and of its rows, once they are read."""
    note: str = ""
    """Why they were lost."""

    def settle(self, record: TensorRecord) -> None:
        """Hand over what was read."""
        if self.digests is None:
            record.note = self.note
            record.row_shape = record.row_axis = None
        else:
            record.digest, record.rows = self.digests


class Pending:
    """Digests that were launched and not read yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Reading] = []
        self._bytes = 0
        self._slabs = Slabs()
        self.bytes_read = 0
        """Of all tensors so far."""
        self.error: RuntimeError | None = None
        """What the device raised when digests were read; those are lost, and their records say so."""

    def add(self, record: TensorRecord, tensor: Tensor, lead: int = 0, axis: int = 0) -> Reading:
        """Launch the digest of ``tensor`` as it is now, and of its rows (``lead`` axes from ``axis`` on).

        ``record`` gets them when they are read.
        """
        # A tensor class of somebody's own may have no memory behind it; torch asks the class.
        if tensor.is_cuda and type(tensor) in digest.PLAIN and tree.usable(tensor.device):
            whole, rows, width = tree.vectors(tensor, lead, axis, self._slabs)
        else:
            whole, rows, width = _by_torch(tensor, lead, axis)
        reading = Reading(whole, rows, tensor.numel() * tensor.element_size(), width, [record])
        with self._lock:
            self._waiting.append(reading)
            self.bytes_read += reading.size
            self._bytes += whole.nbytes + (0 if rows is None else rows.nbytes)
            if self._bytes > BOUND:
                self._read()
        return reading

    def join(self, record: TensorRecord, reading: Reading) -> None:
        """``record`` gets the digests of a tensor that was read before."""
        with self._lock:
            if reading.whole is None:
                reading.settle(record)
            else:
                reading.records.append(record)

    def read(self) -> None:
        """Wait for the devices and hand every digest to its records."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        self._slabs.clear()
        found: dict[int, Tensor] = {}
        try:
            found = _stores([v for r in waiting for v in (r.whole, r.rows) if v is not None])
        except RuntimeError as error:  # a kernel of the run failed, and the device with it
            self.error = self.error or error
        for reading in waiting:
            if found and reading.whole is not None:
                rows = None if reading.rows is None else _text(reading.rows, found, reading.width)
                reading.digests = _text(reading.whole, found, reading.size), rows
            else:
                reading.note = f"lost: {type(self.error).__name__} when it was read"
            for record in reading.records:
                reading.settle(record)
            reading.whole = reading.rows = None
            reading.records.clear()


def _by_torch(tensor: Tensor, lead: int, axis: int) -> tuple[Vectors, Vectors | None, int]:
    whole, rows, width = digest.vectors(tensor, lead, axis)
    return _stored(whole), None if rows is None else _stored(rows), width


def _stored(found: Tensor) -> Vectors:
    return Vectors(found.flatten(0, 1), 0, found.shape[0], found.shape[1])


def _text(vectors: Vectors, stores: dict[int, Tensor], size: int) -> str:
    store = stores[id(vectors.store)]
    count = vectors.many * vectors.each
    found = store[vectors.first : vectors.first + count].view(vectors.many, vectors.each, digest.COLUMNS)
    return digest.text(digest.sums(found), size)


def _stores(wanted: list[Vectors]) -> dict[int, Tensor]:
    """What lies in the memory of the vectors, as far as it is used, on the host, by the memory's id."""
    used: dict[int, tuple[Tensor, int]] = {}
    for v in wanted:
        end = v.first + v.many * v.each
        used[id(v.store)] = v.store, max(end, used.get(id(v.store), (v.store, 0))[1])
    if not used:
        return {}
    with digest._plain(torch.device("cpu")):
        return dict(zip(used, _to_host([store[:end] for store, end in used.values()]), strict=True))


def _to_host(made: list[Tensor]) -> list[Tensor]:
    """The tensors on the host: one copy per device, behind everything that was launched there on any stream."""
    found = list(made)
    for device in {t.device for t in made if t.device.type != "cpu"}:
        there = [i for i, t in enumerate(made) if t.device == device]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        parts = torch.cat([made[i].reshape(-1) for i in there]).cpu().split([made[i].numel() for i in there])
        for i, part in zip(there, parts, strict=True):
            found[i] = part.view(made[i].shape)
    return found


def row_axes(shape: tuple[int, ...], axes: int, first: int = 0) -> int:
    """How many axes of this shape, from ``first`` on, count its rows when ``axes`` were declared. One axis is left to be the row,
    if there is one; 0 where the shape ends before them."""
    rest = len(shape) - first
    if not axes or rest <= 0:
        return 0
    return min(axes, rest if first else max(rest - 1, 1))
