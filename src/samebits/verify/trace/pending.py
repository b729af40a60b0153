"""Digests on their way: what was launched on the devices and is read back once, so that recording never waits for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.verify.trace import digest
from samebits.verify.trace.events import TensorRecord

BOUND = 64 << 20
"""Bytes in flight on all devices, after which everything is read back: the one place that waits. A tensor takes at most 16 KiB, a
row as much as a tensor of its size."""


@dataclass(frozen=True)
class _Waiting:
    record: TensorRecord
    whole: Tensor
    rows: Tensor | None
    size: int
    """Bytes of the tensor."""
    width: int
    """Bytes of a row."""


class Pending:
    """Digests that were launched and not read yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._bytes = 0
        self.error: RuntimeError | None = None
        """What the device raised when digests were read; those are lost, and their records say so."""

    def add(self, record: TensorRecord, tensor: Tensor, lead: int = 0, axis: int = 0) -> None:
        """Launch the digest of ``tensor`` as it is now, and of its rows (``lead`` axes from ``axis`` on).

        ``record`` gets them when they are read.
        """
        whole, rows, width = digest.vectors(tensor, lead, axis)
        with self._lock:
            self._waiting.append(_Waiting(record, whole, rows, tensor.numel() * tensor.element_size(), width))
            self._bytes += whole.nbytes + (0 if rows is None else rows.nbytes)
            if self._bytes > BOUND:
                self._read()

    def read(self) -> None:
        """Wait for the devices and hand every digest to its record."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        made = [found for w in waiting for found in (w.whole, w.rows) if found is not None]
        try:
            here = _to_host(made)
        except RuntimeError as error:  # a kernel of the run failed, and the device with it
            self.error = self.error or error
            for w in waiting:
                w.record.note = f"lost: {type(error).__name__} when it was read"
                w.record.row_shape = w.record.row_axis = None
            return
        for w in waiting:
            w.record.digest = digest.text(digest.sums(here[id(w.whole)]), w.size)
            if w.rows is not None:
                w.record.rows = digest.text(digest.sums(here[id(w.rows)]), w.width)


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
