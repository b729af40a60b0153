"""The trace as a value and as a file of JSON lines: header, one line per event, footer. Reading runs no code from the file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.verify.trace import digest
from samebits.verify.trace.events import Event, Phase, event_from_json

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "samebits-trace"
VERSION = 1


class TraceError(ValueError):
    """A file that is no trace, or not a whole one. The message names the file and the line."""


@dataclass
class Trace:
    """What one rank of one run recorded. Events are in the order in which they ended."""

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    stopped: dict[str, Any] | None = None
    """Where an exception ended the run: ``path``, ``error``, ``message``; None for a run that came to its end."""
    path: Path | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Full tensors that were kept, where the trace was not read from a file."""
    tensor_files: list[str] = field(default_factory=list)

    @property
    def digest_name(self) -> str:
        return str(self.header.get("digest"))

    def phase(self, phase: Phase) -> list[Event]:
        """Calls and gradients of one phase, in order of their ends; parameters are apart, see :meth:`parameters`."""
        return [event for event in self.events if event.phase == phase and event.kind != "parameter"]

    def parameters(self) -> list[Event]:
        return [event for event in self.events if event.kind == "parameter"]

    def tensor(self, name: str) -> Tensor:
        """A full tensor that was kept (``TensorRecord.kept``). Raises KeyError where there is none of that name."""
        if name in self.tensors:
            return self.tensors[name]
        for file in self.tensor_files:
            from safetensors import safe_open

            place = file if self.path is None else str(self.path.parent / file)
            with safe_open(place, framework="pt") as handle:
                if name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    return handle.get_tensor(name)
        raise KeyError(name)

    def write(self, path: Path) -> None:
        counts = Counter(event.kind for event in self.events)
        footer = {
            "kind": "footer",
            "events": len(self.events),
            "by_kind": dict(counts),
            "tensor_files": self.tensor_files,
            "stopped": self.stopped,
        }
        with path.open("w") as file:
            for line in (self.header, *(event.to_json() for event in self.events), footer):
                file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
        self.path = path


def header(**parts: Any) -> dict[str, Any]:
    return {"kind": "header", "format": FORMAT, "version": VERSION, "digest": digest.NAME, **parts}


def read(path: str | Path) -> Trace:
    """Read a trace file. Raises TraceError for anything but a whole trace of a version that is known here."""
    path = Path(path)
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace: it is not text") from error
    if not lines:
        raise TraceError(f"{path} is empty")
    try:
        head = _parse(path, 1, lines[0])
    except TraceError:
        head = {}
    if head.get("kind") != "header" or head.get("format") != FORMAT:
        raise TraceError(f"{path} is no trace: its first line is not a {FORMAT} header")
    if head.get("version") != VERSION:
        raise TraceError(f"{path} has trace version {head.get('version')!r}; this samebits reads version {VERSION}")
    tail = _parse(path, len(lines), lines[-1]) if len(lines) > 1 else {}
    if tail.get("kind") != "footer":
        raise TraceError(f"{path} has no footer: the run that wrote it was cut off, or the file was")
    events = []
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            events.append(event_from_json(_parse(path, number, line)))
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
    if len(events) != tail.get("events"):
        raise TraceError(f"{path}: the footer counts {tail.get('events')} events, there are {len(events)}")
    files = tail.get("tensor_files") or []
    if any(Path(name).name != name for name in files):
        raise TraceError(f"{path}: tensor files must lie beside the trace")
    return Trace(head, events, tail.get("stopped"), path, {}, files)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {number}: {error.msg}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
    return value
