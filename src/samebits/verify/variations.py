"""The axes of batch invariance, as batches of row ids. Pure: no tensor, no device.

Every variation runs one or more batches that together hold some canonical rows; whatever else is in a batch, each of
those rows must come out with the bits it has in the canonical batch 0 .. T-1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from samebits.verify.subject import GARBAGE_ROWS, ZERO_ROW

AXES = ("repeat", "batch", "position", "padding", "chunk", "permutation", "single", "plan", "autograd", "fold")
"""``plan`` (launch configuration), ``autograd`` (against the explicit backward) and ``fold`` (parameter gradients)
need more than row ids."""

EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 288, 289, 513, 1025, 4097)
"""Batch sizes beside the thresholds where implementations switch."""


@dataclass(frozen=True)
class Part:
    ids: tuple[int, ...]
    keep: tuple[int, ...]
    """Positions that hold canonical rows; the rest is padding."""


@dataclass(frozen=True)
class Variation:
    axis: str
    label: str
    parts: tuple[Part, ...]


def whole(ids: list[int]) -> Part:
    return Part(tuple(ids), tuple(range(len(ids))))


def variations(rows: int, axes: tuple[str, ...] = AXES) -> Iterator[Variation]:
    """All variations of a canonical batch of ``rows`` rows along the named axes."""
    everyone = list(range(rows))
    garbage = [rows + k for k in range(GARBAGE_ROWS)]
    if "repeat" in axes:
        for run in (2, 3):
            yield Variation("repeat", f"run {run} vs run 1", (whole(everyone),))
    if "batch" in axes:
        for size in [n for n in EDGES if n < rows]:
            yield Variation("batch", f"batch size {size} vs {rows}", (whole(everyone[:size]),))
        for size in [n for n in EDGES if n > rows][:3]:
            ids = everyone + [garbage[k % GARBAGE_ROWS] for k in range(size - rows)]
            yield Variation("batch", f"batch size {size} vs {rows}", (Part(tuple(ids), tuple(range(rows))),))
    if "position" in axes:
        others = [garbage[k % GARBAGE_ROWS] for k in range(16)]
        for row in sorted({0, rows // 2, rows - 1}):
            for place in (0, 1, 8, 16):
                label = f"row {row} at position {place} of 17 vs position {row} of {rows}"
                yield Variation("position", label, (Part((*others[:place], row, *others[place:]), (place,)),))
    if "padding" in axes:
        for count in (1, 5):
            for kind, pad in (("zero", [ZERO_ROW] * count), ("garbage", garbage[:count])):
                left = Part((*pad, *everyone), tuple(range(count, count + rows)))
                right = Part((*everyone, *pad), tuple(range(rows)))
                yield Variation("padding", f"{count} {kind} rows before vs none", (left,))
                yield Variation("padding", f"{count} {kind} rows after vs none", (right,))
    if "chunk" in axes:
        for size in [n for n in (3, 7, 16, 33, 100) if n < rows]:
            parts = tuple(whole(everyone[at : at + size]) for at in range(0, rows, size))
            yield Variation("chunk", f"chunks of {size} vs one batch of {rows}", parts)
    if "permutation" in axes:
        shuffled = random.Random(20260812).sample(everyone, rows)
        yield Variation("permutation", "rows reversed vs ascending", (whole(everyone[::-1]),))
        yield Variation("permutation", "rows shuffled vs ascending", (whole(shuffled),))
    if "single" in axes:
        yield Variation("single", f"each row alone vs a batch of {rows}", tuple(whole([row]) for row in everyone))
