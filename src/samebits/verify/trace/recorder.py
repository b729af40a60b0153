"""The state of one recording: the count of events, the stack of open calls, the records of tensors."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samebits.verify.trace import digest
from samebits.verify.trace.digest import PLAIN
from samebits.verify.trace.events import SHARD, Event, Kind, Phase, TensorRecord
from samebits.verify.trace.keeping import Kept
from samebits.verify.trace.layout import Layout, Layouts
from samebits.verify.trace.options import Options
from samebits.verify.trace.pending import Batch, Pending, Reading, row_axes
from samebits.verify.trace.ranks import rank_and_world
from samebits.verify.trace.reuse import Known, place_of
from samebits.verify.trace.vectors import Job

_NOTHING: Any = ((), (), {}, (), ())
"""Inputs, outputs, values, what is opaque and kernels of an event that has none yet."""
graph_task = torch._C._current_graph_task_id
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


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Call] = []


class Recorder:
    """Not a context manager: hooks call it, and :class:`~samebits.verify.trace.session.Tracing` opens and closes it.

    Safe to use from several threads: they share counters, and lists that are only appended to.
    """

    def __init__(self, options: Options, kept: Kept) -> None:
        self.options = options
        self.events: list[Event] = []
        self.closed = False
        self.failed: tuple[BaseException, str] | None = None
        """The last error that left a module, and the innermost module that it left."""
        self._kept = kept
        self._pending = Pending()
        self._layouts = Layouts()
        self._unsettled: list[tuple[TensorRecord, Reading]] = []
        self._known = Known() if options.reuse else None
        self._count = itertools.count()
        self._calls: dict[tuple[str, str, str], itertools.count[int]] = defaultdict(itertools.count)
        self._local = _Thread()
        self._asked = False
        """Whether there are several ranks."""

    def tick(self) -> int:
        """The next position in the order of begins and ends."""
        return next(self._count)

    @property
    def stack(self) -> list[Call]:
        """Open calls of this thread, outermost first."""
        return self._local.stack

    @staticmethod
    def phase() -> Phase:
        """A module that is called while a backward runs is being recomputed."""
        return "forward" if graph_task() == OUTSIDE else "recompute"

    def event(self, kind: Kind, phase: Phase, path: str, cls: str = "") -> Event:
        """A new event that begins now, inside the innermost open call. What it has none of it shares until :meth:`finish`."""
        stack, parent = self._local.stack, None
        if stack:
            parent = stack[-1].event.start
        elif phase != "backward" or not self._asked:
            # Outside of all calls; a backward's forward has asked already, if it was recorded.
            self._asked = True
            if self._known is not None and rank_and_world()[1] > 1:
                self.read_everything()  # torch.distributed writes in place and does not count it
        now, call = next(self._count), next(self._calls[kind, phase, path])
        return Event(kind, phase, path, cls, call, now, now, parent, len(stack), *_NOTHING)

    def emit(self, event: Event) -> None:
        """The event ended. It may be emitted once, and may still get later ends while the trace is open."""
        event.end = next(self._count)
        self.events.append(event)

    def read_everything(self) -> None:
        """From now on nothing is known from before: torch's count of writes says nothing in this run."""
        self._known = None

    def batch(self) -> Batch:
        """For tensors that are read at the same moment."""
        return Batch(self._pending)

    def records(
        self,
        event: Event,
        given: Iterable[tuple[str, Tensor | None]],
        rows: bool = True,
        keep: bool = False,
        after: int = -1,
        batch: Batch | None = None,
    ) -> list[Any]:
        """The tensors as they are now, by their places. Their digests are launched and arrive when the trace is closed.

        A tensor that is known is not read again, unless that was at or before the position ``after``. Records are made in the
        end, by :func:`_made`: until then the list has place, layout and reading of each tensor, one behind the other. With a
        ``batch`` the launch is left to whoever made it.
        """
        known = None if keep or (rows and self.options.rows) else self._known
        mine = batch
        found: list[Any] = []
        try:
            for where, tensor in given:
                if tensor is None:
                    continue
                if known is not None and type(tensor) in PLAIN:
                    # What is usual is done here and not by calls: the model waits, for each tensor of every call.
                    try:
                        at, address, shape = tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.shape
                        was = known.seen.get((at, address, shape))
                        if was is not None:
                            layout, reading = was
                            if (
                                tensor._version == reading.version
                                and reading.position > after
                                and tensor.stride() == layout.stride
                                and tensor.dtype is layout.kind
                                and not (reading.note or tensor.is_neg())
                            ):
                                found += where, layout, reading
                                continue
                        if mine is None:
                            mine = Batch(self._pending)
                        new = self._direct(known, mine, event, tensor, at, address, after)
                        if new is not None:
                            found += where, *new
                            continue
                    except RuntimeError:  # it has no memory, shape or count of writes
                        pass
                if mine is None:
                    mine = Batch(self._pending)
                found += self._record(mine, event, where, tensor, rows, keep, after)
        finally:
            if batch is None and mine is not None:
                mine.launch()
        return found

    def _direct(
        self, known: Known, batch: Batch, event: Event, tensor: Tensor, at: int, address: int, after: int
    ) -> tuple[Layout, Reading] | None:
        """Of a tensor that is not known by its sight; None where it is not of the usual kind, and :meth:`_record` is for it."""
        shape = tensor.shape
        layout = self._layouts.direct.get((tensor.dtype, shape, tensor.stride(), tensor.device))
        if layout is None or tensor.is_neg():
            return None
        version, place = tensor._version, (at, address, layout.view)
        reading = known.readings.get(place)
        if reading is None or reading.version != version or reading.position <= after or reading.note:
            storage, part = tensor.untyped_storage(), layout.direct
            if part is None or not storage.data_ptr() or batch.is_captured():
                return None
            if layout.index != batch.index:
                batch.on(layout.index)
            reading = Reading(1, part.each, None, 0, part.next_level, layout.nbytes, version, event.start)
            batch.jobs.append(tuple.__new__(Job, (tensor, 0, part, reading)))  # Job() is a function of Python
            batch.readings.append(reading)
            if at not in known.alive:
                known.adopt(storage)
            known.readings[place] = reading
        found = known.seen[at, address, shape] = layout, reading
        return found

    def _record(
        self, batch: Batch, event: Event, where: str, tensor: Tensor, rows: bool, keep: bool, after: int
    ) -> tuple[Any, ...]:
        """Of a tensor that is not known by its sight."""
        local, placed = (tensor, "") if type(tensor) in PLAIN else _local_shard(tensor)
        layout = self._layouts.of(local)
        why = layout.why
        if why is None and layout.is_cuda and batch.is_captured():
            why = digest.CAPTURED
        if why is None:
            lead, axis = 0, self.options.batch_axis
            if rows and self.options.rows:
                lead = row_axes(layout.shape, self.options.rows, axis)
            try:
                reading = self._reading(batch, event, local, layout, lead, axis, after)
                if not (lead or keep or placed):
                    return where, layout, reading
                record = _blank(where, layout, placed)
                if lead:
                    record.row_shape, record.row_axis = layout.shape[axis : axis + lead], axis
                self._unsettled.append((record, reading))
                if keep:
                    self._keep(record, event, where, local)
                return record, None, None
            except (RuntimeError, NotImplementedError, TypeError) as error:
                # A tensor class of somebody's own, or no memory left: the run that is being watched must go on.
                why = f"not read: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        record = _blank(where, layout, placed)
        record.note = f"{placed}; {why}" if placed else why
        return record, None, None

    def _keep(self, record: TensorRecord, event: Event, where: str, tensor: Tensor) -> None:
        refused = self._kept.refuses(tensor.dtype)
        if refused is None:
            record.kept = f"{event.start}.{event.phase}.{where}"
            self._kept.add(record.kept, tensor)
        else:
            record.note = f"{record.note}; {refused}" if record.note else refused

    def _reading(
        self, batch: Batch, event: Event, tensor: Tensor, layout: Layout, lead: int, axis: int, after: int
    ) -> Reading:
        known = self._known
        if known is None or not layout.counted:
            return batch.add(tensor, layout, lead, axis)
        place = place_of(tensor, layout, lead, axis)
        reading = known.find(place, tensor._version, after)
        if reading is None:
            reading = batch.add(tensor, layout, lead, axis)
            known.add(tensor, place, event.start, reading)
        if not lead:
            known.seen[place[0], place[1], tensor.shape] = layout, reading
        return reading

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
        for record, reading in self._unsettled:
            reading.settle(record)
        self._unsettled.clear()
        for event in self.events:
            event.inputs, event.outputs = _settled(event.inputs), _settled(event.outputs)
            event.values, event.opaque, event.kernels = dict(event.values), list(event.opaque), list(event.kernels)
        return sorted(self.events, key=lambda event: event.end)


def _settled(found: list[Any]) -> list[TensorRecord]:
    """Records in place of what stands for them."""
    each = iter(found)
    return [
        where if isinstance(where, TensorRecord) else _made(where, layout, reading)
        for where, layout, reading in zip(each, each, each, strict=True)
    ]


def _made(where: str, layout: Layout, reading: Reading) -> TensorRecord:
    record = _blank(where, layout)
    reading.settle(record)
    return record


def _blank(where: str, layout: Layout, note: str = "") -> TensorRecord:
    return TensorRecord(where, layout.dtype, layout.shape, layout.stride, layout.device, note=note)


def _local_shard(tensor: Tensor) -> tuple[Tensor, str]:
    """Of a DTensor the part that lies here, and how it was placed."""
    if type(tensor).__name__ != "DTensor":
        return tensor, ""
    local = tensor._local_tensor  # type: ignore[attr-defined]
    placements = ", ".join(str(p) for p in tensor.placements)  # type: ignore[attr-defined]
    return local, f"{SHARD}{tuple(tensor.shape)}: {placements}"
