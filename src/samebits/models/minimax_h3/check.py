"""One thing that must hold of a replay, and where it did not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.models.minimax_h3.forward import StageResult
    from samebits.models.minimax_h3.record import CaseResult


@dataclass(frozen=True)
class Check:
    """Something that must hold, whether it did, and where it did not."""

    name: str
    judged: int
    """How many stages or gradients it was asked of. Of none, it says nothing, and passes."""
    passed: bool
    detail: str = ""


def judged(name: str, found: Iterable[tuple[str, bool]]) -> Check:
    """The check of a name from (place, whether it held there)."""
    places = list(found)
    broken = [place for place, held in places if not held]
    return Check(name, len(places), not broken, "; ".join(broken))


def of_stages(
    cases: Sequence[CaseResult],
    name: str,
    holds: Callable[[StageResult], bool],
    asked: Callable[[StageResult], bool] = lambda stage: True,
) -> Check:
    """Asked of every stage but the stand-ins, which promise nothing."""
    found = [(case.title, stage) for case in cases for stage in case.stages if not stage.stand_in and asked(stage)]
    return judged(name, [(f"{title}: {stage.name}", holds(stage)) for title, stage in found])
