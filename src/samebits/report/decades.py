"""A logarithmic axis that has a place for zero (same bits, no error) and for what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

BESIDE = 0.16
"""Of the axis: from an end of it to what has no place on it, zero and what is not finite."""
_LOOSE = 1.5
"""An axis of fewer decades than that is cut to its values, and has labels between the powers."""

_SHORTEST = 0.4
"""Decades, so that there is a label: from 2 to 5 they are 0.398."""


@dataclass(frozen=True)
class Decades:
    """``low`` and ``high`` are powers of ten, whole ones where the axis is long; a value lies at its logarithm above ``low``."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float | None], high: int | None = None, whole: bool = False) -> Decades:
        """Of all positive values, up to the power above the largest, or to ``high``; ``whole``: from power to power in any case."""
        sizes = [math.log10(value) for value in values if value is not None and 0 < value < math.inf]
        least, most = (min(sizes), max(sizes)) if sizes else (-3.0, -2.0)
        if high is None and not whole and most - least < _LOOSE:
            beyond = max(0.15, (_SHORTEST - most + least) / 2)
            return cls(least - beyond, most + beyond)
        top = math.floor(most) + 1 if high is None else high
        return cls(min(math.floor(least), top - 1), top)

    @property
    def span(self) -> float:
        return self.high - self.low

    def at(self, value: float) -> float:
        """Its place in decades; zero and what is below the axis lie left of it, what is not finite lies right of it."""
        if value == math.inf:
            return self.span * (1 + BESIDE)
        zero = -BESIDE * self.span
        return max(math.log10(value) - self.low, zero) if value > 0 else zero

    def ticks(self, most: int = 5) -> dict[float, str]:
        """Values to their labels: at most so many powers, and 2 and 5 of each power where the axis is short."""
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        if self.span < _LOOSE + 0.3:
            around = range(math.floor(self.low), math.ceil(self.high) + 1)
            fine = [float(f"{digit}e{power}") for power in around for digit in (1, 2, 5)]
            return {value: _decimal(value) for value in fine if 0 <= math.log10(value) - self.low <= self.span}
        step = -(-len(powers) // most)
        return {10.0**power: _power(power) for power in powers if (powers[-1] - power) % step == 0}


def _power(power: int) -> str:
    return "1" if power == 0 else f"$10^{{{power}}}$"


def _decimal(value: float) -> str:
    if value >= 1e-3:
        return f"{value:g}"
    digit, _, power = f"{value:.0e}".partition("e")
    return f"${digit}\\cdot10^{{{int(power)}}}$"
