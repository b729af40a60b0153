"""Names of the kernels that each call launched, by torch's profiler. On a CPU: the names of the ATen operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from samebits.verify.trace.events import Event

_RANGE = "samebits:"
_OWN = "samebits:trace"
_NOTHING = nullcontext()
_MOST = 200
"""Names kept per call."""


class Ranges:
    """Marks the calls on the profiler's time line. Does nothing unless it was asked for."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._profiler: Any = None
        self._open: dict[int, Any] = {}
        if wanted:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        if self._profiler is not None:
            self._profiler.start()

    def enter(self, event: Event) -> None:
        if self._profiler is not None:
            self._open[event.start] = mark = torch.profiler.record_function(f"{_RANGE}{event.start}")
            mark.__enter__()

    def leave(self, event: Event) -> None:
        mark = self._open.pop(event.start, None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def own(self) -> AbstractContextManager[Any]:
        """What the trace itself launches belongs to no call."""
        return _NOTHING if self._profiler is None else torch.profiler.record_function(_OWN)

    def stop(self, events: list[Event]) -> None:
        """End the profile and hand each event the names of what ran directly inside it, in order."""
        if self._profiler is None:
            return
        self._profiler.stop()
        by_start = {event.start: event for event in events if event.kind == "module" and event.phase != "backward"}
        for entry in self._profiler.events():
            owner = _owner(entry)
            if owner is None or owner not in by_start:
                continue
            names = by_start[owner].kernels
            found = [kernel.name for kernel in entry.kernels] or ([entry.name] if _is_outermost(entry) else [])
            names.extend(found[: max(0, _MOST - len(names))])


def _owner(entry: Any) -> int | None:
    """``start`` of the innermost call around an entry of the profile."""
    around = entry.cpu_parent
    while around is not None:
        if around.name == _OWN:
            return None
        if around.name.startswith(_RANGE):
            return int(around.name.removeprefix(_RANGE))
        around = around.cpu_parent
    return None


def _is_outermost(entry: Any) -> bool:
    """An operation as it was called, not one of the operations that it is made of."""
    return entry.name.startswith("aten::") and entry.cpu_parent is not None and entry.cpu_parent.name.startswith(_RANGE)
