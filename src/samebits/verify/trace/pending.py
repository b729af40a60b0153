"""Digests on their way: what was launched on the devices and is read back once, so that recording never waits for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.verify.trace import digest, vectors
from samebits.verify.trace.events import TensorRecord
from samebits.verify.trace.layout import Layout
from samebits.verify.trace.vectors import Job, Memories, Vectors

BOUND = 64 << 20
"""Bytes in flight on all devices, after which everything is read back: the one place that waits. A tensor takes at most 16 KiB, a
row as much as a tensor of its size."""


@dataclass(eq=False, slots=True)
class Reading(Vectors):
    """One tensor as it was read: its sums on their way; later the digests."""

    size: int = 0
    """Bytes of the tensor."""
    version: int = -1
    """torch's count of writes to the tensor when it was read."""
    position: int = -1
    """In the trace, when it was read."""
    rows: Vectors | None = None
    width: int = 0
    """Bytes of a row."""
    digests: tuple[str, str | None] | None = None
    """Of the tensor and of its rows, once they are read."""
    note: str = ""
    """Why they were lost."""

    def settle(self, record: TensorRecord) -> None:
        """Hand over what was read."""
        if self.digests is None:
            record.note = f"{record.note}; {self.note}" if record.note else self.note
            record.row_shape = record.row_axis = None
        else:
            record.digest, record.rows = self.digests


class Batch:
    """Tensors that are read at the same moment: :meth:`launch` takes as few launches for them as it can.

    Nothing may be launched between the moment that they are recorded for and the end of :meth:`launch`.
    """

    __slots__ = ("captured", "index", "jobs", "made_by_torch", "pending", "readings", "shared")

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.readings: list[Reading] = []
        self.jobs: list[Job] = []
        """What is to be launched for them."""
        self.index = -1
        """Of the GPU that all jobs are for, see :meth:`on`."""
        self.shared: list[tuple[Vectors, Vectors]] = []
        """See :meth:`samebits.verify.trace.vectors.Memories.launch`."""
        self.made_by_torch = 0
        """Bytes of sums that need no launch."""
        self.captured: bool | None = None
        """What runs on the current stream is captured for a CUDA graph; None: nobody has asked."""

    def is_captured(self) -> bool:
        if self.captured is None:
            self.captured = digest.capturing()
        return self.captured

    def on(self, index: int) -> None:
        """The next job is for this GPU."""
        if index != self.index:
            self.launch()
            self.index = index

    def add(self, tensor: Tensor, layout: Layout, lead: int = 0, axis: int = 0) -> Reading:
        """The tensor and its rows (``lead`` axes from ``axis`` on)."""
        if not layout.fast:
            whole_sums, row_sums, width = digest.vectors(tensor, lead, axis)
            reading = Reading(*_stored(whole_sums), size=layout.nbytes, width=width)
            if row_sums is not None:
                reading.rows = Vectors(*_stored(row_sums))
                self.made_by_torch += row_sums.nbytes
            self.made_by_torch += whole_sums.nbytes
            self.readings.append(reading)
            return reading
        reading = Reading(size=layout.nbytes)
        if lead or layout.part is None:
            whole, rows, reading.width = vectors.jobs(tensor, reading, lead, axis)
        else:
            whole, rows = vectors.job(tensor, layout.part, reading), None
        self.on(layout.index)
        if rows is not None:
            reading.rows = rows.into
            self.jobs.append(rows)
            if whole is None:
                self.shared.append((rows.into, reading))
        if whole is not None:
            self.jobs.append(whole)
        self.readings.append(reading)
        return reading

    def launch(self) -> None:
        if self.readings:
            self.pending.launch(self.readings, self.jobs, self.shared, self.made_by_torch)
            self.readings, self.jobs, self.shared, self.made_by_torch = [], [], [], 0


class Pending:
    """Digests that were launched and not read yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Reading] = []
        self._bytes = 0
        self._memories = Memories()
        self._read_before = 0
        """Bytes of the tensors whose digests have been read."""
        self.error: RuntimeError | None = None
        """What the device raised when digests were read; those are lost, and their records say so."""

    def launch(
        self, readings: list[Reading], jobs: list[Job], shared: list[tuple[Vectors, Vectors]], nbytes: int
    ) -> None:
        """``nbytes`` are those of sums that need no launch."""
        with self._lock:
            try:
                if jobs:
                    nbytes += self._memories.launch(jobs, shared)
            except RuntimeError as error:  # no memory left: the run that is being watched must go on
                for reading in readings:
                    reading.store, reading.note = None, f"not read: {_one_line(error)}"
                return
            self._waiting += readings
            self._bytes += nbytes
            if self._bytes > BOUND:
                self._read()

    @property
    def bytes_read(self) -> int:
        """Of all tensors so far."""
        return self._read_before + sum(reading.size for reading in self._waiting)

    def read(self) -> None:
        """Wait for the devices and read every digest."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        self._read_before = self.bytes_read
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        found: dict[int, Tensor] = {}
        try:
            found = self._stores(waiting)
        except RuntimeError as error:  # a kernel of the run failed, and the device with it
            self.error = self.error or error
        self._memories.clear()
        for reading in waiting:
            if found and reading.store is not None:
                rows = None if reading.rows is None else _text(reading.rows, found, reading.width)
                reading.digests = _text(reading, found, reading.size), rows
            else:
                reading.note = f"lost: {type(self.error).__name__} when it was read"
            reading.store = reading.rows = None

    def _stores(self, waiting: list[Reading]) -> dict[int, Tensor]:
        """What lies in the memory of the vectors, as far as it is used, on the host, by the memory's id."""
        wanted = [v for reading in waiting for v in (reading, reading.rows) if v is not None]
        for index in {v.store.get_device() for v in wanted if v.store is not None and v.store.is_cuda}:
            torch.cuda.synchronize(index)
        self._memories.finish()
        used: dict[int, tuple[Tensor, int]] = {}
        for v in wanted:
            assert v.store is not None, "launched"
            end = v.first + v.count
            used[id(v.store)] = v.store, max(end, used.get(id(v.store), (v.store, 0))[1])
        if not used:
            return {}
        with digest._plain(torch.device("cpu")):
            return dict(zip(used, _to_host([store[:end] for store, end in used.values()]), strict=True))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _stored(found: Tensor) -> tuple[int, int, Tensor]:
    return found.shape[0], found.shape[1], found.flatten(0, 1)


def _text(vectors: Vectors, stores: dict[int, Tensor], size: int) -> str:
    store = stores[id(vectors.store)]
    found = store[vectors.first : vectors.first + vectors.count].view(vectors.many, vectors.each, digest.COLUMNS)
    return digest.text(digest.sums(found), size)


def _to_host(made: list[Tensor]) -> list[Tensor]:
    """The tensors on the host: one copy per device, which waits for the current stream there."""
    found = list(made)
    for device in {t.device for t in made if t.device.type != "cpu"}:
        there = [i for i, t in enumerate(made) if t.device == device]
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
