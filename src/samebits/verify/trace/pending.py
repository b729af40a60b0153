"""Digests on their way: device buffers that are read back once, so that recording never waits for the device."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.verify.trace import digest
from samebits.verify.trace.events import TensorRecord

BLOCK = 1 << 14
"""Digests per buffer (256 KiB)."""
BOUND = 1 << 20
"""Digests in flight on all devices (16 MiB), after which everything is read back: the one place that waits."""


@dataclass(frozen=True)
class _Waiting:
    record: TensorRecord
    buffer: Tensor
    """int64 (digests, 2): the whole tensor first, then its rows."""
    start: int
    rows: int
    size: int
    width: int


class Pending:
    """Digests that were launched and not read yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[torch.device, tuple[Tensor, int]] = {}
        self._waiting: list[_Waiting] = []
        self._count = 0

    def add(self, record: TensorRecord, tensor: Tensor, lead: int) -> None:
        """Launch the digest of ``tensor`` as it is now, and of its rows (``lead`` axes in front); ``record`` gets them later."""
        whole, by_row, width = digest.lanes(tensor, lead)
        rows = 0 if by_row is None else by_row.shape[0]
        with self._lock:
            buffer, start = self._claim(tensor.device, 1 + rows)
            with torch.no_grad():
                buffer[start : start + 1].copy_(whole)
                if by_row is not None:
                    buffer[start + 1 : start + 1 + rows].copy_(by_row)
            size = tensor.numel() * tensor.element_size()
            self._waiting.append(_Waiting(record, buffer, start, rows, size, width))
            self._count += 1 + rows
            if self._count > BOUND:
                self._read()

    def read(self) -> None:
        """Wait for the devices and hand every digest to its record."""
        with self._lock:
            self._read()

    def _claim(self, device: torch.device, count: int) -> tuple[Tensor, int]:
        buffer, used = self._blocks.get(device, (None, 0))
        if buffer is None or used + count > buffer.shape[0]:
            with torch.inference_mode(False):
                buffer, used = torch.empty(max(BLOCK, count), digest.LANES, dtype=torch.int64, device=device), 0
        self._blocks[device] = (buffer, used + count)
        return buffer, used

    def _read(self) -> None:
        waiting, self._waiting, self._blocks, self._count = self._waiting, [], {}, 0
        for device in {w.buffer.device for w in waiting if w.buffer.is_cuda}:
            torch.cuda.synchronize(device)  # the digests were launched on whatever streams the model used
        read: dict[int, list[list[int]]] = {}
        for w in waiting:
            values = read.get(id(w.buffer))
            if values is None:
                values = read[id(w.buffer)] = w.buffer.cpu().tolist()
            w.record.digest = digest.text(*values[w.start], w.size)
            if w.record.row_shape is not None:
                rows = values[w.start + 1 : w.start + 1 + w.rows]
                w.record.rows = "".join(digest.text(*row, w.width) for row in rows)


def row_lead(shape: tuple[int, ...], axes: int) -> int:
    """How many axes in front of this shape count its rows when ``axes`` were declared: one is left as the row, if there is one."""
    return min(axes, max(len(shape) - 1, 1)) if shape and axes else 0


def row_count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
