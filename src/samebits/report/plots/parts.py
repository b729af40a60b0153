"""What every plot of a record is made of: the record's numbers by row and case, its peer, and where it was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samebits.report.plots.style import Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "samebits"
Values = list[list[float | None]]
"""By row and case."""


@dataclass(frozen=True)
class Plot:
    name: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Context:
    peer: str
    whose: str
    """The peer as the owner of something."""
    where: str
    """The end of every caption."""


def context(replay: dict[str, Any]) -> Context:
    named = (
        ("diffusers", "diffusers'") if replay["peer"].startswith("diffusers") else ("the provider", "the provider's")
    )
    stamp = replay["environment"]
    run = f"beside {replay['peer']}, on {replay['device']}, torch {stamp['torch']}, commit {stamp['commit'][:12]}"
    return Context(*named, f"{replay['geometry']}; weights: {replay['weights']}; {run}.")


def table(cases: Sequence[Sequence[Any]], value: Callable[[Any], float | None]) -> Values:
    """Every case has the same rows."""
    return [[value(entry) for entry in entries] for entries in zip(*cases, strict=True)]


def both(
    cases: Sequence[Sequence[Any]], about: Context, value: Callable[[Any, str], float | None]
) -> tuple[Series, ...]:
    """The peer's and ours; ``value`` is given the start of the keys of which."""
    return (
        Series("peer", about.peer, table(cases, lambda entry: value(entry, "peer_"))),
        Series("ours", OURS, table(cases, lambda entry: value(entry, ""))),
    )


def agreement(cases: Sequence[Sequence[Any]]) -> tuple[Series, ...]:
    return (
        Series("chained", "chained", table(cases, lambda entry: share(entry["chained"]))),
        Series("isolated", "isolated", table(cases, lambda entry: share(entry["isolated"]))),
    )


def measured(values: Values) -> bool:
    return any(value is not None for found in values for value in found)


def share(agreement: dict[str, Any] | None) -> float | None:
    return None if agreement is None else agreement["differing"] / max(agreement["elements"], 1)


def varying(rows: dict[str, Any]) -> float:
    """Share of the rows, or of those that ran alone, which are few: whichever is larger."""
    alone = rows.get("alone_varying", 0) / max(rows.get("alone", 0), 1)
    return max(rows["varying"] / max(rows["checked"], 1), alone)


def finite(error: float | None) -> float:
    """A record has no number for what is not finite."""
    return math.inf if error is None else error
