"""How one boundary of two runs differs: ``exact.compare`` with a name, the size of the gap, and a form for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from samebits.exact.bits import bits
from samebits.exact.compare import first_difference


@dataclass(frozen=True)
class Difference:
    """``first`` is the index of the first differing element in row-major order; None where nothing differs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    differing: int
    max_abs: float | None = None
    """None if nothing differs or a differing element is NaN or infinite."""
    max_ulp: int | None = None
    first: tuple[int, ...] | None = None
    ours_bits: str = ""
    theirs_bits: str = ""
    ours: float | None = None
    theirs: float | None = None
    note: str = ""
    """Why the tensors could not be compared at all, if they could not."""

    @property
    def same(self) -> bool:
        return self.differing == 0

    def __str__(self) -> str:
        if self.same:
            return f"{self.name}: same bits ({self.elements} x {self.dtype})"
        text = f"{self.name}: {self.differing} of {self.elements} differ"
        if self.note:
            return f"{text}; {self.note}"
        size = "" if self.max_abs is None else f", max abs {self.max_abs:.3g}, max ulp {self.max_ulp}"
        where = ", ".join(str(i) for i in self.first or ())
        return f"{text}{size}; first at [{where}]: {self.ours_bits} ({self.ours}) against {self.theirs_bits} ({self.theirs})"


def count_differing(ours: Tensor, theirs: Tensor) -> int:
    return int((bits(ours) != bits(theirs)).sum())


def rows_differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Per row of the first axis, whether any bit differs."""
    return (bits(ours) != bits(theirs)).flatten(1).any(-1)


def difference(name: str, ours: Tensor, theirs: Tensor) -> Difference:
    """Compare two tensors that should have been the same."""
    shape, dtype = tuple(ours.shape), str(ours.dtype).removeprefix("torch.")
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        note = (
            f"{dtype} {shape} cannot be compared with {str(theirs.dtype).removeprefix('torch.')} {tuple(theirs.shape)}"
        )
        return Difference(name, shape, dtype, ours.numel(), max(ours.numel(), 1), note=note)
    found = first_difference(ours, theirs)
    if found is None:
        return Difference(name, shape, dtype, ours.numel(), 0)
    gap = (ours.double() - theirs.double()).abs()
    largest = float(gap[bits(ours) != bits(theirs)].max())
    return Difference(
        name=name,
        shape=shape,
        dtype=dtype,
        elements=found.total,
        differing=found.count,
        max_abs=_finite(largest),
        max_ulp=found.max_ulp,
        first=(found.row, *found.column),
        ours_bits=found.left_bits,
        theirs_bits=found.right_bits,
        ours=_finite(found.left),
        theirs=_finite(found.right),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
