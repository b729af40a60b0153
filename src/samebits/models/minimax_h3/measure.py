"""Agreement of two sets of outputs as bits, and the error of one against the golden."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.exact.compare import same_bits
from samebits.models.difference import Difference, difference
from samebits.verify.tolerance import Tolerance


@dataclass(frozen=True)
class Agreement:
    """Bits of all outputs of a stage beside those of another run. A different number of outputs is a difference."""

    same: bool
    differing: int
    elements: int
    max_abs: float | None = None
    max_ulp: int | None = None
    first: str = ""
    """The first differing element, in words."""


def agreement(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Agreement:
    elements = sum(value.numel() for value in ours)
    if len(ours) != len(theirs):
        return Agreement(False, elements, elements, first=f"{len(ours)} outputs against {len(theirs)}")
    found: list[Difference] = []
    for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not same_bits(one, other):  # cheap, and the answer most of the time
            found.append(difference("" if len(ours) == 1 else f"output {position}", one, other))
    if not found:
        return Agreement(True, 0, elements)
    gaps = [entry.max_abs for entry in found]
    steps = [entry.max_ulp for entry in found]
    return Agreement(
        same=False,
        differing=sum(entry.differing for entry in found),
        elements=elements,
        max_abs=None if None in gaps else max(gap for gap in gaps if gap is not None),
        max_ulp=None if None in steps else max(step for step in steps if step is not None),
        first=str(found[0]).removeprefix(": "),
    )


def repeats(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Error:
    """Distance from the golden."""

    max_abs: float | None
    """None: not finite, or the shapes differ."""
    relative: float | None
    """max_abs over the golden's largest magnitude."""
    used: float | None
    """The worst element's share of its tolerance; at most 1 is within."""
    correctly_rounded: float
    """Share of elements that are the golden rounded to the dtype."""

    @property
    def within(self) -> bool:
        return self.used is not None and self.used <= 1


def error(values: tuple[Tensor, ...], golden: tuple[Tensor, ...], limit: Tolerance) -> Error:
    """Worst over all outputs. Where a result is not finite, or shapes or numbers of outputs differ, there is no distance."""
    if [v.shape for v in values] != [g.shape for g in golden]:
        return Error(None, None, None, 0.0)
    largest = absolute = used = 0.0
    exact = elements = 0
    for value, true in zip(values, golden, strict=True):
        apart = (value.detach().double() - true.detach()).abs_()
        size = true.detach().abs()
        absolute = _worst(absolute, apart)
        largest = _worst(largest, size)
        used = _worst(used, apart.div_(size.mul_(limit.relative).add_(limit.absolute)))
        exact += int((rounded(true.detach(), value.dtype) == value.detach()).sum())
        elements += value.numel()
    relative = absolute / largest if largest else (0.0 if absolute == 0 else math.inf)
    return Error(_finite(absolute), _finite(relative), _finite(used), exact / max(elements, 1))


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """FP64 to ``dtype``, rounded once. A cast to 16 bits goes through FP32, where a number beside a tie becomes the tie."""
    if dtype.itemsize > 2:
        return exact.to(dtype)
    near = exact.float()
    lost = exact - near.double()
    # To FP32 by rounding to odd: an inexact number never gets an even last bit, so it is neither a tie nor representable.
    step = torch.where((lost > 0) == (near > 0), 1, -1)
    even = (lost != 0) & near.isfinite() & (near != 0) & ((near.view(torch.int32) & 1) == 0)
    word = near.view(torch.int32) + (step * even).to(torch.int32)
    return word.view(torch.float32).to(dtype)


def _worst(so_far: float, values: Tensor) -> float:
    """The maximum, in which a NaN wins."""
    found = float(values.max()) if values.numel() else 0.0
    return math.nan if math.isnan(found) or math.isnan(so_far) else max(so_far, found)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``count`` positions, the first and the last among them."""
    return torch.linspace(0, count - 1, min(limit, count)).long().unique().tolist() if count else []
