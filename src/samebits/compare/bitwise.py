"""Comparisons of bits that end in counts and in the first difference, never in an exception."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from samebits.compare.contestant import Found
from samebits.exact.bits import bits
from samebits.exact.compare import first_difference

_KEPT = 3
"""First failures that a report names."""


def difference(left: Tensor, right: Tensor) -> str | None:
    """The first difference in words; another shape or dtype is one."""
    if left.dtype != right.dtype:
        return f"{left.dtype} against {right.dtype}"
    if left.shape != right.shape:
        return f"shape {tuple(left.shape)} against {tuple(right.shape)}"
    found = first_difference(left, right)
    return None if found is None else str(found)


def differing(left: Tensor, right: Tensor) -> int:
    """How many elements differ; all of them where the tensors are of different kinds."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return max(left.numel(), right.numel(), 1)
    return int((bits(left) != bits(right)).sum())


@dataclass
class Tally:
    """Comparisons of one kind. Without any, nothing was shown: the verdict is None, not a pass."""

    compared: int = 0
    failed: int = 0
    first_failures: list[str] = field(default_factory=list)

    def compare(self, label: str, name: str, left: Tensor, right: Tensor) -> None:
        """One tensor against another one of the same name."""
        self.compared += 1
        what = difference(left, right)
        if what is not None:
            self.fail(f"{name}, {label}: {what}")

    def fail(self, text: str) -> None:
        self.failed += 1
        if len(self.first_failures) < _KEPT:
            self.first_failures.append(text)

    @property
    def passed(self) -> bool | None:
        if self.failed:
            return False
        return True if self.compared else None

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "compared": self.compared,
            "failed": self.failed,
            "first_failures": list(self.first_failures),
        }


@dataclass
class Equality:
    """Bits of every result and gradient of a peer against ours, over batches of several sizes."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    miscounted: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def compare(self, rows: int, ours: Found, theirs: Found) -> None:
        """A tensor that only one of the two has is a difference, as is a result too many."""
        self.sizes.append(rows)
        told = [*theirs.miscounted, *(f"ours: {text}" for text in ours.miscounted)]
        told += [f"only one has {name}" for name in sorted(set(ours.values) ^ set(theirs.values))]
        self.miscounted += [text for text in told if text not in self.miscounted]
        for name in ours.values:
            if name in theirs.values:
                self._tensor(name, rows, ours.values[name], theirs.values[name])

    def _tensor(self, name: str, rows: int, one: Tensor, other: Tensor) -> None:
        entry = self.tensors.setdefault(name, {"same": True, "differing": 0, "elements": 0, "first": None})
        entry["elements"] += one.numel()
        what = difference(one, other)
        if what is not None:
            entry["differing"] += differing(one, other)
            if entry["same"]:
                entry["first"] = f"ours against theirs in a batch of {rows}: {what}"
            entry["same"] = False

    def same(self, gradients: bool | None = None) -> bool | None:
        """Of all, of the gradients or of the results. None where there was nothing to compare."""
        chosen = [e["same"] for n, e in self.tensors.items() if gradients in (None, n.startswith("grad_"))]
        if self.miscounted:
            return False
        return all(chosen) if chosen else None

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.same(),
            "same_results": self.same(False),
            "same_gradients": self.same(True),
            "miscounted": self.miscounted,
            "batches": self.sizes,
            "tensors": self.tensors,
        }
