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
from samebits.verify.trace.reuse import Known, Place, place_of

dispatch_keys, strided = torch._C._dispatch_keys, torch.strided
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
        now = next(self._count)
        call = next(self._calls[kind, phase, path])
        parent = stack[-1].event.start if stack else None
        return Event(kind, phase, path, cls, call, now, now, parent, len(stack))

    def emit(self, event: Event) -> None:
        """The event ended. It may be emitted once, and may still get later ends while the trace is open."""
        event.end = next(self._count)
        self.events.append(event)

    def read_everything(self) -> None:
        """From now on nothing is known from before: torch's count of writes says nothing in this run."""
        self._known = None

    def record(
        self, event: Event, where: str, tensor: Tensor, rows: bool = True, keep: bool = False, after: int = -1
    ) -> Any:
        """One tensor, as :meth:`records`."""
        return self.records(event, ((where, tensor),), rows, keep, after)[0]

    def records(
        self,
        event: Event,
        given: Iterable[tuple[str, Tensor]],
        rows: bool = True,
        keep: bool = False,
        after: int = -1,
    ) -> list[Any]:
        """The tensors as they are now, by their places. Their digests are launched and arrive when the trace is closed.

        A tensor that is known is not read again, unless that was at or before the position ``after``. Its record is made in the
        end as well; until then (place, layout, reading) stands for it.
        """
        known = None if keep or (rows and self.options.rows) else self._known
        layouts, readings = self._layouts.known, None if known is None else known.readings
        found: list[Any] = []
        batch: Batch | None = None
        captured: bool | None = None
        try:
            for where, tensor in given:
                # What is usual is done here and not by calls: the model waits, for each tensor of every call.
                layout = place = None
                if readings is not None and type(tensor) in PLAIN and tensor.layout is strided and not tensor.is_nested:
                    keys = dispatch_keys(tensor).raw_repr()
                    layout = layouts.get((keys, tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()))
                    if layout is not None and layout.counted:
                        if captured is None and layout.is_cuda:
                            captured = digest.capturing()
                        place = (tensor.untyped_storage()._cdata, tensor.data_ptr(), layout.view)
                        was = readings.get(place)
                        if (
                            was is not None
                            and was[0] == tensor._version
                            and was[1] > after
                            and not (captured or was[2].note)
                        ):
                            found.append((where, layout, was[2]))
                            continue
                if batch is None:
                    batch = Batch(self._pending, captured)
                found.append(self._record(batch, event, where, tensor, rows, keep, after, layout, place))
        finally:
            if batch is not None:
                batch.launch()
        return found

    def _record(
        self,
        batch: Batch,
        event: Event,
        where: str,
        tensor: Tensor,
        rows: bool,
        keep: bool,
        after: int,
        layout: Layout | None,
        place: Place | None,
    ) -> TensorRecord:
        """``layout`` and ``place``, where they are known already: the second says that what lies there is not."""
        local, placed = (tensor, "") if type(tensor) in PLAIN else _local_shard(tensor)
        if layout is None:
            layout = self._layouts.of(local)
        record = TensorRecord(where, layout.dtype, layout.shape, layout.stride, layout.device, note=placed)
        why = layout.why
        if why is None and layout.is_cuda and batch.captured:
            why = digest.CAPTURED
        if why is None:
            lead, axis = 0, self.options.batch_axis
            if rows and self.options.rows:
                lead = row_axes(layout.shape, self.options.rows, axis)
                if lead:
                    record.row_shape, record.row_axis = layout.shape[axis : axis + lead], axis
            try:
                if place is not None and self._known is not None:
                    reading = batch.add(local, layout)
                    self._known.add(local, place, event.start, reading)
                else:
                    reading = self._reading(batch, event, local, layout, lead, axis, after)
                self._unsettled.append((record, reading))
                if keep:
                    self._keep(record, event, where, local)
                return record
            except (RuntimeError, NotImplementedError, TypeError) as error:
                # A tensor class of somebody's own, or no memory left: the run that is being watched must go on.
                why = f"not read: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
                record.row_shape = record.row_axis = record.kept = None
        record.note = f"{placed}; {why}" if placed else why
        return record

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
        return sorted(self.events, key=lambda event: event.end)


def _settled(found: list[Any]) -> list[TensorRecord]:
    """Records in place of what stands for them."""
    return [_made(*entry) if type(entry) is tuple else entry for entry in found]


def _made(where: str, layout: Layout, reading: Reading) -> TensorRecord:
    record = TensorRecord(where, layout.dtype, layout.shape, layout.stride, layout.device)
    reading.settle(record)
    return record


def _local_shard(tensor: Tensor) -> tuple[Tensor, str]:
    """Of a DTensor the part that lies here, and how it was placed."""
    if type(tensor).__name__ != "DTensor":
        return tensor, ""
    local = tensor._local_tensor  # type: ignore[attr-defined]
    placements = ", ".join(str(p) for p in tensor.placements)  # type: ignore[attr-defined]
    return local, f"{SHARD}{tuple(tensor.shape)}: {placements}"
