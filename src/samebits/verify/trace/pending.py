"""Digests on their way: what was launched on the devices and is read back once, so that recording never waits for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samebits.verify.trace import digest
from samebits.verify.trace.events import TensorRecord

BOUND = 64 << 20
"""Bytes in flight on all devices, after which everything is read back: the one place that waits. A tensor takes at most 16 KiB, a
row as much as a tensor of its size."""


@dataclass(eq=False)
class Reading:
    """One tensor as it was read: its sums on their way, and who waits for them; later the digests."""

    whole: Tensor | None
    rows: Tensor | None
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
        self.error: RuntimeError | None = None
        """What the device raised when digests were read; those are lost, and their records say so."""

    def add(self, record: TensorRecord, tensor: Tensor, lead: int = 0, axis: int = 0) -> Reading:
        """Launch the digest of ``tensor`` as it is now, and of its rows (``lead`` axes from ``axis`` on).

        ``record`` gets them when they are read.
        """
        whole, rows, width = digest.vectors(tensor, lead, axis)
        reading = Reading(whole, rows, tensor.numel() * tensor.element_size(), width, [record])
        with self._lock:
            self._waiting.append(reading)
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
        made = [found for r in waiting for found in (r.whole, r.rows) if found is not None]
        try:
            here = _to_host(made)
        except RuntimeError as error:  # a kernel of the run failed, and the device with it
            self.error = self.error or error
            here = {}
        for reading in waiting:
            if here:
                rows = None if reading.rows is None else digest.text(digest.sums(here[id(reading.rows)]), reading.width)
                reading.digests = digest.text(digest.sums(here[id(reading.whole)]), reading.size), rows
            else:
                reading.note = f"lost: {type(self.error).__name__} when it was read"
            for record in reading.records:
                reading.settle(record)
            reading.whole = reading.rows = None
            reading.records.clear()


def _to_host(made: list[Tensor]) -> dict[int, Tensor]:
    """The tensors by id, on the host: one copy per device, behind everything that was launched there on any stream."""
    found: dict[int, Tensor] = {}
    for device in {t.device for t in made}:
        there = [t for t in made if t.device == device]
        if device.type == "cpu":
            found |= {id(t): t for t in there}
            continue
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with torch.no_grad():
            parts = torch.cat([t.reshape(-1) for t in there]).cpu().split([t.numel() for t in there])
        found |= {id(t): part.view(t.shape) for t, part in zip(there, parts, strict=True)}
    return found


def row_axes(shape: tuple[int, ...], axes: int, first: int = 0) -> int:
    """How many axes of this shape, from ``first`` on, count its rows when ``axes`` were declared. One axis is left to be the row,
    if there is one; 0 where the shape ends before them."""
    rest = len(shape) - first
    if not axes or rest <= 0:
        return 0
    return min(axes, rest if first else max(rest - 1, 1))
