"""Where two tensors first differ, as bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.exact.bits import bits, canonical_nan, pattern

UNORDERED = torch.iinfo(torch.int64).max
"""ULP distance from or to a NaN."""


@dataclass(frozen=True)
class Difference:
    """The first element, in index order, whose bits differ, and how far the difference reaches."""

    row: int
    column: tuple[int, ...]
    """Index within the row; empty for a vector."""
    left_bits: str
    right_bits: str
    left: float
    right: float
    count: int
    """How many elements differ."""
    total: int
    max_ulp: int | None
    """Largest distance in units in the last place over all elements; None where a NaN faces a number."""

    def __str__(self) -> str:
        ulp = "NaN against number" if self.max_ulp is None else f"at most {self.max_ulp} ulp apart"
        return (
            f"row {self.row}, column {', '.join(map(str, self.column)) or '-'}: {self.left_bits} ({self.left:.9g}) against "
            f"{self.right_bits} ({self.right:.9g}); {self.count} of {self.total} elements differ, {ulp}"
        )


def first_difference(left: Tensor, right: Tensor, payloads: bool = True) -> Difference | None:
    """None if the bits agree everywhere; -0 differs from +0. With ``payloads=False`` all NaNs count as one value.

    Raises ValueError where shape or dtype differ: that is another fault, and it must not read as a bit difference.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"cannot compare {left.dtype} {tuple(left.shape)} with {right.dtype} {tuple(right.shape)}: not the same kind of tensor"
        )
    if not payloads:
        left, right = canonical_nan(left), canonical_nan(right)
    unequal = bits(left) != bits(right)
    count = int(unequal.sum())
    if count == 0:
        return None
    flat = int(unequal.flatten().to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(left.shape))) if left.dim() else ()
    one, other = left.detach()[index], right.detach()[index]
    ulp = int(ulp_distance(left, right).max()) if left.dtype.is_floating_point else UNORDERED
    return Difference(
        row=index[0] if index else 0,
        column=index[1:],
        left_bits=pattern(one),
        right_bits=pattern(other),
        left=float(one),
        right=float(other),
        count=count,
        total=left.numel(),
        max_ulp=None if ulp == UNORDERED else ulp,
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and bool(torch.equal(bits(left), bits(right)))


def ulp_distance(left: Tensor, right: Tensor) -> Tensor:
    """Representable numbers between two elements, int64. -0 and +0 are 0 apart; a NaN is ``UNORDERED`` from a number."""
    a, b = _ordered(left), _ordered(right)
    apart = (a - b).abs()
    wrapped = (a < 0) != (b < 0)  # only float64 can wrap, and only across zero
    apart = torch.where(wrapped & (apart < a.abs()), UNORDERED - 1, apart)
    nan_left, nan_right = left.detach().isnan(), right.detach().isnan()
    apart = torch.where(nan_left != nan_right, UNORDERED, apart)
    return torch.where(nan_left & nan_right, 0, apart)


def _ordered(tensor: Tensor) -> Tensor:
    """An int64 that grows with the value, by one per representable number."""
    view = bits(tensor).to(torch.int64)
    lowest = -(1 << 8 * tensor.element_size() - 1)
    return torch.where(view < 0, lowest - view, view)
