"""One case: the oracle and the provider on the same bytes, then every row alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samebits.accept.cases import Case, Workload
from samebits.accept.provider import Provider
from samebits.accept.trace import Boundary, Trace, compare, first_divergence
from samebits.exact.compare import first_difference
from samebits.verify.subject import first_line


@dataclass(frozen=True)
class Varying:
    """A boundary that came out otherwise in another company of rows."""

    boundary: str
    company: str
    """E.g. ``row 3 alone``."""
    what: str
    also: int = 0
    """In how many more compositions."""


@dataclass(frozen=True)
class CaseResult:
    """What one case showed. Passed: every boundary the same on both sides, and every row the same in any company."""

    name: str
    form: str
    family: str
    rows: int
    hidden: int
    fusion_mode: str
    trainability: str
    boundaries: tuple[Boundary, ...] = ()
    divergence: str = ""
    """The first boundary, in order of recording, that differs, and how; empty if none does."""
    compositions: int = 0
    """In how many other compositions of the batch its rows were compared."""
    varying: tuple[Varying, ...] = ()
    reason: str = ""
    """Why the case could not run to its end."""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not (self.reason or self.divergence or self.varying) and bool(self.boundaries)

    @property
    def same(self) -> int:
        return sum(boundary.verdict == "same" for boundary in self.boundaries)

    def to_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["boundaries"] = [dataclasses.asdict(boundary) for boundary in self.boundaries]
        fields["varying"] = [dataclasses.asdict(entry) for entry in self.varying]
        return {"passed": self.passed, **fields}


def examine(case: Case, provider: Provider, workload: Workload, oracle: Trace) -> CaseResult:
    """``oracle`` is the trace of the oracle on the same workload. Nothing a provider raises gets out."""
    contract = case.contract
    found = CaseResult(
        case.name,
        getattr(provider, "form", "composed"),
        case.family,
        case.rows,
        contract.hidden,
        contract.fusion_mode,
        contract.trainability,
    )
    given = workload.fingerprint()
    try:
        trace = workload.run(provider)
        boundaries = tuple(compare(oracle, trace))
        found = dataclasses.replace(
            found, boundaries=boundaries, divergence=_divergence(oracle, trace, boundaries), notes=trace.notes
        )
        varying, count = _in_other_company(case, provider, workload, trace)
        found = dataclasses.replace(found, varying=varying, compositions=count)
        reason = _not_finite(case, trace)
    except NotImplementedError as error:
        reason = first_line(error) if str(error) else f"{provider.name} raised NotImplementedError without a reason"
    except Exception as error:
        reason = f"{provider.name} raised {type(error).__name__}: {first_line(error)}"
    if workload.fingerprint() != given:
        reason = f"{provider.name} changed its inputs" + (f"; {reason}" if reason else "")
    return dataclasses.replace(found, reason=reason)


def _divergence(oracle: Trace, trace: Trace, boundaries: Sequence[Boundary]) -> str:
    """The first boundary that differs, and how many more do."""
    wrong = {boundary.name: boundary for boundary in boundaries if boundary.verdict != "same"}
    at = first_divergence(oracle, trace)
    if not wrong:
        return "" if at is None else f"the boundaries come in another order: {at[0]} against {at[1]}"
    # A shape can differ where no byte does, so the first one need not be a difference of digests.
    first = next((name for name in at or () if name in wrong), next(iter(wrong)))
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{first}: {wrong[first].what}{more}"


def _in_other_company(
    case: Case, provider: Provider, workload: Workload, packed: Trace
) -> tuple[tuple[Varying, ...], int]:
    """Each row alone, and the batch without its padding, against the packed batch: bytes, forward and backward."""
    groups = [(f"row {row} alone", [row], False) for row in range(workload.rows)]
    if case.padding:
        kept = [row for row in range(workload.rows) if row not in case.padding]
        groups.append((f"without the zero rows {', '.join(map(str, case.padding))}", kept, True))
    found: dict[str, Varying] = {}
    for company, rows, shared_too in groups:
        alone = workload.only(rows).run(provider)
        for name, what in _differences(packed, alone, rows, shared_too):
            earlier = found.get(name)
            found[name] = (
                Varying(name, company, what) if earlier is None else dataclasses.replace(earlier, also=earlier.also + 1)
            )
    return tuple(found.values()), len(groups)


def _differences(packed: Trace, alone: Trace, rows: list[int], shared_too: bool) -> list[tuple[str, str]]:
    """(boundary, how) wherever the rows of the packed batch have other bytes than the batch of only them."""
    if packed.names() != alone.names():
        names = sorted(set(packed.names()) ^ set(alone.names()))
        return [(", ".join(names), "is recorded in one of the two batches only")]
    found = []
    for record in packed:
        if not record.rows and not shared_too:
            continue
        one = record.tensor[torch.tensor(rows, device=record.tensor.device)] if record.rows else record.tensor
        other = alone[record.name].tensor
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append((record.name, f"{one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"))
            continue
        difference = first_difference(one, other)
        if difference is not None:
            found.append((record.name, str(difference)))
    return found


def _not_finite(case: Case, trace: Trace) -> str:
    """Zero rows must leave every number finite: a NaN of the published formula would reach every parameter gradient."""
    if not case.padding:
        return ""
    wrong = [record.name for record in trace if not bool(record.tensor.isfinite().all())]
    return f"zero rows made {', '.join(wrong)} not finite" if wrong else ""
