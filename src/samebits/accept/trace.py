"""What a run leaves behind: one digest per named boundary, in order, and how two runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.checks import dtype_name
from samebits.exact.bits import digest
from samebits.exact.compare import first_difference

Verdict = Literal["same", "differs", "missing", "extra"]


@dataclass(frozen=True)
class Record:
    """One boundary. ``digest`` is SHA-256 over the little-endian bytes of the tensor in index order."""

    name: str
    digest: str
    dtype: str
    shape: tuple[int, ...]
    rows: bool
    """Whether the first axis is the token."""
    tensor: Tensor = field(repr=False, compare=False)


class Trace:
    """Boundaries in the order in which they were recorded, and notes on how they were computed."""

    def __init__(self, device: torch.device, notes: dict[str, Any] | None = None) -> None:
        self.device = device
        self.notes = dict(notes or {})
        self._records: dict[str, Record] = {}

    def add(self, name: str, tensor: Tensor, rows: bool = True) -> None:
        """Raises TypeError where a provider gave something else than a tensor, ValueError for a name used twice."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if name in self._records:
            raise ValueError(f"the boundary {name} was recorded twice")
        if tensor.device != self.device:
            raise TypeError(f"{name} is on {tensor.device}, not on {self.device}")
        kept = tensor.detach().contiguous().clone()  # the provider may use its memory again
        self._records[name] = Record(name, digest(kept), dtype_name(kept.dtype), tuple(kept.shape), rows, kept)

    def add_copy(self, name: str, tensor: Tensor, original: Tensor) -> None:
        """A boundary that must be a copy. Raises ValueError where it shares the memory of what it copies."""
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.data_ptr() == original.data_ptr():
            raise ValueError(f"{name} shares the memory of its original; the contract is a copy")
        self.add(name, tensor)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __getitem__(self, name: str) -> Record:
        return self._records[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._records)

    def digests(self) -> dict[str, str]:
        return {record.name: record.digest for record in self}


@dataclass(frozen=True)
class Boundary:
    """One boundary of two runs side by side. An absent side is None."""

    name: str
    verdict: Verdict
    oracle: str | None
    provider: str | None
    what: str = ""
    """Where the two differ first, in words; empty where they do not."""


def first_divergence(one: Trace, other: Trace) -> tuple[str | None, str | None] | None:
    """The names at the first position where name or hash of the two records differ; None if nowhere."""
    left, right = list(one), list(other)
    for index in range(max(len(left), len(right))):
        a = left[index] if index < len(left) else None
        b = right[index] if index < len(right) else None
        if a is None or b is None or (a.name, a.digest) != (b.name, b.digest):
            return (a.name if a else None, b.name if b else None)
    return None


def compare(oracle: Trace, provider: Trace) -> list[Boundary]:
    """Every boundary of either side, in the oracle's order, then what only the provider has."""
    found = []
    for record in oracle:
        if record.name not in provider:
            why = "the provider has no such boundary"
            found.append(Boundary(record.name, "missing", record.digest, None, why))
            continue
        other = provider[record.name]
        what = difference(record, other)
        verdict: Verdict = "differs" if what else "same"
        found.append(Boundary(record.name, verdict, record.digest, other.digest, what))
    for record in provider:
        if record.name not in oracle:
            found.append(Boundary(record.name, "extra", None, record.digest, "the oracle has no such boundary"))
    return found


def difference(one: Record, other: Record) -> str:
    """Where two records differ, in words; empty if they do not. Shape and dtype count, not only the bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {one.shape} against {other.dtype} {other.shape}"
    if one.digest == other.digest:
        return ""
    return str(first_difference(one.tensor, other.tensor))
