"""What a trace is made of: one event per call, per version of a parameter and per gradient, with a record per tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["module", "operator", "parameter", "gradient"]
Phase = Literal["forward", "backward", "recompute"]
KINDS = ("module", "operator", "parameter", "gradient")
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")
ROOT = "(model)"
"""Path of the outermost module."""
SHARD = "shard of "
"""How the note of a part of a distributed tensor begins."""
HEX = 32
"""Hex digits of one digest."""


@dataclass(slots=True)
class TensorRecord:
    """One tensor at one moment. ``digest`` is None where there was nothing to digest, and ``note`` says why."""

    where: str
    """Its place in the call: ``args.0``, ``kwargs.mask``, ``output.logits``, a parameter's name."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    digest: str | None = None
    row_shape: tuple[int, ...] | None = None
    """The axes that count the rows, where row digests were asked for."""
    row_axis: int | None = None
    """The first of them."""
    rows: str | None = None
    """Digests of the rows one after the other, 32 hex digits each."""
    kept: str | None = None
    """Name of the full tensor in the files beside the trace."""
    note: str = ""

    def row(self, index: int) -> str:
        assert self.rows is not None
        return self.rows[HEX * index : HEX * (index + 1)]

    @property
    def is_shard(self) -> bool:
        """The part of a distributed tensor that lies on this rank."""
        return self.note.startswith(SHARD)

    @property
    def one_row(self) -> tuple[int, ...] | None:
        """Shape of a single row; None where there are none."""
        if self.row_shape is None or self.row_axis is None or self.rows is None:
            return None
        return self.shape[: self.row_axis] + self.shape[self.row_axis + len(self.row_shape) :]

    @property
    def row_count(self) -> int:
        return 0 if self.rows is None else len(self.rows) // HEX


@dataclass(slots=True)
class Event:
    """One call, parameter or gradient.

    In the backward, ``inputs`` are the gradients of a call's outputs and ``outputs`` what the call contributed to the gradients
    of its inputs.
    """

    kind: Kind
    phase: Phase
    path: str
    """Qualified name of the module or parameter, or of the operator with its direction."""
    cls: str = ""
    call: int = 0
    """How often this path had been called before in this phase."""
    start: int = 0
    end: int = 0
    """Positions of the event's begin and end in one count over the whole trace."""
    parent: int | None = None
    """``start`` of the enclosing module call; of a backward, of the forward call that it belongs to."""
    depth: int = 0
    inputs: list[TensorRecord] = field(default_factory=list)
    outputs: list[TensorRecord] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """Arguments that are plain values, by place, as Python writes them."""
    opaque: list[str] = field(default_factory=list)
    """Arguments that were not looked into: place and type."""
    kernels: list[str] = field(default_factory=list)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without the fields that say nothing."""
        found = {key: value for key, value in asdict(self).items() if value not in ("", [], {}, None)}
        for place in ("inputs", "outputs"):
            if place in found:
                found[place] = [{k: v for k, v in r.items() if v is not None and v != ""} for r in found[place]]
        return found


def event_from_json(data: dict[str, Any]) -> Event:
    """Raises ValueError, KeyError or TypeError where ``data`` is no event."""
    if data.get("kind") not in KINDS or data.get("phase") not in PHASES:
        raise ValueError(f"unknown kind {data.get('kind')!r} or phase {data.get('phase')!r}")
    made = {key: value for key, value in data.items() if key not in ("inputs", "outputs")}
    event = Event(**made)
    event.inputs = [_record(entry) for entry in data.get("inputs", [])]
    event.outputs = [_record(entry) for entry in data.get("outputs", [])]
    return event


def _record(data: dict[str, Any]) -> TensorRecord:
    record = TensorRecord(**data)
    record.shape, record.stride = tuple(record.shape), tuple(record.stride)
    if record.row_shape is not None:
        record.row_shape = tuple(record.row_shape)
    return record
