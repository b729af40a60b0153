"""The state of one recording: the count of events, the stack of open calls, the records of tensors."""

from __future__ import annotations

import functools
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samebits.verify.trace import digest
from samebits.verify.trace.events import SHARD, Event, Kind, Phase, TensorRecord
from samebits.verify.trace.keeping import Kept
from samebits.verify.trace.options import Options
from samebits.verify.trace.pending import Pending, row_axes
from samebits.verify.trace.ranks import rank_and_world
from samebits.verify.trace.reuse import Known, place_of

OUTSIDE = -1
"""Id of the backward that runs in this thread, where none runs."""


@dataclass(slots=True)
class Call:
    """A module call that has begun."""

    module: Any
    event: Event
    error: BaseException | None
    """What was being handled when it began, so that an error of its own can be told from it."""
    edges: list[tuple[str, Any, int]] = field(default_factory=list)
    """Where the gradients of its inputs go: place, node, number of the node's output."""
    begin: int = 0
    """Autograd's sequence number at its begin: nodes of this call have at least this one."""


class Recorder:
    """Not a context manager: hooks call it, and :class:`~samebits.verify.trace.session.Tracing` opens and closes it."""

    def __init__(self, options: Options, kept: Kept) -> None:
        self.options = options
        self.events: list[Event] = []
        self.closed = False
        self.failed: tuple[BaseException, str] | None = None
        """The last error that left a module, and the innermost module that it left."""
        self._kept = kept
        self._pending = Pending()
        self._known = Known() if options.reuse else None
        self._count = itertools.count()
        self._calls: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def tick(self) -> int:
        """The next position in the order of begins and ends."""
        return next(self._count)

    @property
    def stack(self) -> list[Call]:
        """Open calls of this thread, outermost first."""
        try:
            return self._local.stack
        except AttributeError:
            self._local.stack = []
            return self._local.stack

    @staticmethod
    def phase() -> Phase:
        """A module that is called while a backward runs is being recomputed."""
        return "forward" if torch._C._current_graph_task_id() == OUTSIDE else "recompute"

    def event(self, kind: Kind, phase: Phase, path: str, cls: str = "") -> Event:
        """A new event that begins now, inside the innermost open call."""
        stack = self.stack
        if not stack and self._known is not None and rank_and_world()[1] > 1:
            self.read_everything()  # torch.distributed writes in place and does not count it
        with self._lock:
            call = self._calls.get((kind, phase, path), 0)
            self._calls[kind, phase, path] = call + 1
        now = self.tick()
        parent = stack[-1].event.start if stack else None
        return Event(kind, phase, path, cls, call, now, now, parent, len(stack))

    def emit(self, event: Event) -> None:
        """The event ended. It may be emitted once, and may still get later ends while the trace is open."""
        event.end = self.tick()
        with self._lock:
            self.events.append(event)

    def read_everything(self) -> None:
        """From now on nothing is known from before: torch's count of writes says nothing in this run."""
        self._known = None

    def record(
        self, event: Event, where: str, tensor: Tensor, rows: bool = True, keep: bool = False, after: int = -1
    ) -> TensorRecord:
        """The tensor as it is now. Its digest is launched on the tensor's device and arrives when the trace is closed.

        A tensor that is known is not read again, unless that was at or before the position ``after``.
        """
        local, placed = (tensor, "") if type(tensor) in digest.PLAIN else _local_shard(tensor)
        why = digest.obstacle(local)
        if why is None:
            shape, stride = tuple(local.shape), local.stride()
        else:
            stride = tuple(local.stride()) if local.layout is torch.strided and not local.is_nested else ()
            shape = () if local.is_nested else tuple(local.shape)
        record = TensorRecord(where, _dtype_name(tensor.dtype), shape, stride, _device_name(local.device), note=placed)
        axis = self.options.batch_axis
        lead = row_axes(shape, self.options.rows, axis) if rows and self.options.rows and why is None else 0
        if lead:
            record.row_shape, record.row_axis = shape[axis : axis + lead], axis
        if why is None:
            try:
                self._digest(record, event, local, lead, axis, after)
                refused = self._kept.refuses(local.dtype) if keep else None
                if refused is not None:
                    record.note = f"{placed}; {refused}" if placed else refused
                elif keep:
                    record.kept = f"{event.start}.{event.phase}.{where}"
                    self._kept.add(record.kept, local)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                # A tensor class of somebody's own, or no memory left: the run that is being watched must go on.
                why = f"not read: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
                record.row_shape = record.row_axis = record.kept = None
        if why is not None:
            record.note = f"{placed}; {why}" if placed else why
        return record

    def _digest(self, record: TensorRecord, event: Event, tensor: Tensor, lead: int, axis: int, after: int) -> None:
        known = self._known
        place = None if known is None else place_of(tensor, lead, axis)
        if known is None or place is None:
            self._pending.add(record, tensor, lead, axis)
            return
        reading = known.find(place, after)
        if reading is None:
            known.add(tensor, place, event.start, self._pending.add(record, tensor, lead, axis))
        else:
            self._pending.join(record, reading)

    @property
    def error(self) -> RuntimeError | None:
        """What the device raised when digests were read back."""
        return self._pending.error

    @property
    def bytes_read(self) -> int:
        """Of tensors, for digests, so far."""
        return self._pending.bytes_read

    def finish(self) -> list[Event]:
        """Read what is pending; the events in the order of their ends."""
        self._pending.read()
        return sorted(self.events, key=lambda event: event.end)


def _local_shard(tensor: Tensor) -> tuple[Tensor, str]:
    """Of a DTensor the part that lies here, and how it was placed."""
    if type(tensor).__name__ != "DTensor":
        return tensor, ""
    local = tensor._local_tensor  # type: ignore[attr-defined]
    placements = ", ".join(str(p) for p in tensor.placements)  # type: ignore[attr-defined]
    return local, f"{SHARD}{tuple(tensor.shape)}: {placements}"


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _device_name(device: torch.device) -> str:
    return str(device)
