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
class Reading:
    """One tensor as it was read: its sums on their way; later the digests."""

    whole: Vectors | None
    rows: Vectors | None
    size: int
    """Bytes of the tensor."""
    width: int
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

    __slots__ = ("_bytes", "_captured", "_jobs", "_pending", "_readings", "_shared")

    def __init__(self, pending: Pending, captured: bool | None = None) -> None:
        self._pending = pending
        self._bytes = 0
        """Of the sums that torch has made."""
        self._readings: list[Reading] = []
        self._jobs: list[Job] = []
        self._shared: list[tuple[Vectors, Vectors]] = []
        self._captured = captured

    @property
    def captured(self) -> bool:
        """What runs on the current stream is captured for a CUDA graph."""
        if self._captured is None:
            self._captured = digest.capturing()
        return self._captured

    def add(self, tensor: Tensor, layout: Layout, lead: int = 0, axis: int = 0) -> Reading:
        """The tensor and its rows (``lead`` axes from ``axis`` on)."""
        if layout.fast:
            if lead or layout.part is None:
                whole, rows, into, width = vectors.jobs(tensor, lead, axis)
            else:
                whole, rows, width = vectors.job(tensor, layout.part), None, 0
                into = whole.into
            reading = Reading(into, None if rows is None else rows.into, layout.nbytes, width)
            if self._jobs and tensor.get_device() != self._jobs[0].data.get_device():
                self.launch()
            if rows is not None:
                self._jobs.append(rows)
                if whole is None:
                    self._shared.append((rows.into, into))
            if whole is not None:
                self._jobs.append(whole)
        else:
            whole_sums, row_sums, width = digest.vectors(tensor, lead, axis)
            by_row = None if row_sums is None else _stored(row_sums)
            reading = Reading(_stored(whole_sums), by_row, layout.nbytes, width)
            self._bytes += whole_sums.nbytes + (0 if row_sums is None else row_sums.nbytes)
        self._readings.append(reading)
        return reading

    def launch(self) -> None:
        if self._readings:
            self._pending.launch(self._readings, self._jobs, self._shared, self._bytes)
            self._readings, self._jobs, self._shared, self._bytes = [], [], [], 0


class Pending:
    """Digests that were launched and not read yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Reading] = []
        self._bytes = 0
        self._memories = Memories()
        self.bytes_read = 0
        """Of all tensors so far."""
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
                    reading.whole, reading.note = None, f"not read: {_one_line(error)}"
                return
            self._waiting += readings
            for reading in readings:
                self.bytes_read += reading.size
            self._bytes += nbytes
            if self._bytes > BOUND:
                self._read()

    def read(self) -> None:
        """Wait for the devices and read every digest."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        found: dict[int, Tensor] = {}
        try:
            found = self._stores(waiting)
        except RuntimeError as error:  # a kernel of the run failed, and the device with it
            self.error = self.error or error
        self._memories.clear()
        for reading in waiting:
            if found and reading.whole is not None:
                rows = None if reading.rows is None else _text(reading.rows, found, reading.width)
                reading.digests = _text(reading.whole, found, reading.size), rows
            else:
                reading.note = f"lost: {type(self.error).__name__} when it was read"
            reading.whole = reading.rows = None

    def _stores(self, waiting: list[Reading]) -> dict[int, Tensor]:
        """What lies in the memory of the vectors, as far as it is used, on the host, by the memory's id."""
        wanted = [v for reading in waiting for v in (reading.whole, reading.rows) if v is not None]
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


def _stored(found: Tensor) -> Vectors:
    return Vectors(found.shape[0], found.shape[1], found.flatten(0, 1))


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
