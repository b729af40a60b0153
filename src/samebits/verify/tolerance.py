"""The one place for accuracy tolerances. Invariance has none: it compares bits.

Values: the public operator check of the DeepSeek-V4 mHC work (absolute and relative, as ``torch.allclose``).
The class of a result is part of its declaration (``Result.tolerance``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:g} + {self.relative:g} * |golden|"


_FORWARD = {
    ("reduction", 2): Tolerance(5e-2, 2e-2),
    ("reduction", 4): Tolerance(1e-4, 1e-4),
    ("elementwise", 2): Tolerance(2e-2, 1.6e-2),
    ("elementwise", 4): Tolerance(1e-5, 1e-5),
}
_GRADIENT = _FORWARD | {("reduction", 2): Tolerance(1e-1, 2e-2)}


_LENGTH = 512


def tolerance(kind: str, dtype: torch.dtype, gradient: bool, length: int = 1) -> Tolerance:
    """``kind`` is ``"reduction"`` or ``"elementwise"``; ``length`` is how many terms are summed. FP64 is judged as FP32.

    The published values are for short sums. The error of an FP32 chain of ``length`` random terms grows with their
    number (each partial sum is rounded, and partial sums grow), so beyond 512 terms the absolute part grows with it.
    """
    limit = (_GRADIENT if gradient else _FORWARD)[kind, min(dtype.itemsize, 4)]
    if kind == "reduction" and dtype.itemsize >= 4 and length > _LENGTH:
        return Tolerance(limit.absolute * length / _LENGTH, limit.relative)
    return limit


_OF_LARGEST = {torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3}
"""About three roundings."""


def of_largest(golden: Tensor, dtype: torch.dtype) -> Tolerance:
    """For sums of products that are themselves rounded to ``dtype`` on the way, as attention's: of the largest finite value."""
    finite = golden[golden.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return Tolerance(max(_OF_LARGEST.get(dtype, 1e-6) * largest, torch.finfo(dtype).tiny), 0.0)


@dataclass(frozen=True)
class Excess:
    """The worst element outside the tolerance."""

    row: int
    column: tuple[int, ...]
    value: float
    golden: float
    allowed: float
    count: int
    total: int

    def __str__(self) -> str:
        return (
            f"row {self.row}, column {', '.join(map(str, self.column)) or '-'}: {self.value:.9g} where the golden has "
            f"{self.golden:.9g}, {abs(self.value - self.golden):.3g} away with {self.allowed:.3g} allowed; "
            f"{self.count} of {self.total} elements are outside"
        )


def judge(value: Tensor, golden: Tensor, limit: Tolerance) -> tuple[float, Excess | None]:
    """(largest error as a fraction of what is allowed, the worst element if that is above 1).

    A NaN must meet a NaN, an infinity the same infinity.
    """
    if value.shape != golden.shape:
        raise ValueError(f"result has shape {tuple(value.shape)}, the golden {tuple(golden.shape)}")
    if value.numel() == 0:
        return 0.0, None
    wide, exact = value.detach().double().cpu(), golden.detach().double().cpu()
    allowed = limit.absolute + limit.relative * exact.abs()
    used = (wide - exact).abs() / allowed
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    used = torch.where(same, 0.0, torch.where(used.isnan() | exact.isinf(), float("inf"), used))
    worst = float(used.max())
    if worst <= 1:
        return worst, None
    flat = int(used.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(value.shape))) if value.dim() else ()
    return worst, Excess(
        row=index[0] if index else 0,
        column=index[1:],
        value=float(wide[index]),
        golden=float(exact[index]),
        allowed=float(allowed[index]),
        count=int((used > 1).sum()),
        total=value.numel(),
    )
