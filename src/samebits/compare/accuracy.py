"""The error of results and gradients against the FP64 golden of the operator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from samebits.compare.contestant import Found, Problem
from samebits.verify.tolerance import Tolerance, judge


@dataclass(frozen=True)
class Error:
    """Of one tensor."""

    relative: float
    """Norm of the error over the norm of the golden; over 1 where that is zero."""
    absolute: float
    """The largest one."""
    correctly_rounded: float
    """Fraction of elements that are the golden rounded to their dtype."""
    tolerance_used: float
    """The largest error as a fraction of what ``samebits check`` allows."""


def errors(found: Found, golden: dict[str, Tensor], problem: Problem) -> dict[str, Error]:
    """Of every result and gradient that the golden knows. ValueError where a shape is not the golden's."""
    return {name: _error(name, value, golden[name], problem) for name, value in found.values.items() if name in golden}


def _error(name: str, value: Tensor, golden: Tensor, problem: Problem) -> Error:
    gradient = name.startswith("grad_")
    return error_of(value, golden, problem.tolerance(name.removeprefix("grad_"), value.dtype, gradient))


def error_of(value: Tensor, golden: Tensor, limit: Tolerance) -> Error:
    """ValueError where the shapes differ."""
    used, _ = judge(value, golden, limit)
    wide, exact = value.double(), golden.to(value.device).double()
    off = (wide - exact).abs()
    norm = float(exact.norm()) or 1.0
    return Error(
        relative=float(off.norm()) / norm,
        absolute=float(off.max()) if off.numel() else 0.0,
        correctly_rounded=float((exact.to(value.dtype) == value).double().mean()) if off.numel() else 1.0,
        tolerance_used=used,
    )


def to_json(found: dict[str, Error]) -> dict[str, dict[str, Any]]:
    return {name: asdict(error) for name, error in found.items()}
