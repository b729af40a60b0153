"""What acceptance found, as data and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebits.accept.contract import PROFILE, SCHEMA
from samebits.accept.examine import CaseResult
from samebits.accept.golden import Judgement
from samebits.accept.trace import Boundary, Trace

DIGITS = 8
"""Of a digest, in the tables. The JSON has all of them."""


@dataclass(frozen=True)
class Report:
    model: str
    provider: str
    capabilities: dict[str, Any]
    provenance: dict[str, Any]
    device: str
    environment: dict[str, str]
    cases: tuple[CaseResult, ...]
    golden: list[Judgement]
    oracle: dict[str, Trace] = field(default_factory=dict, repr=False)
    """The oracle's trace of each case; not part of the JSON."""

    @property
    def passed(self) -> bool:
        """Something was run, every case passed, and no recorded digest of the oracle differs."""
        return (
            bool(self.cases)
            and all(case.passed for case in self.cases)
            and all(judged.status != "differs" for judged in self.golden)
        )

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def case(self, name: str, form: str = "composed") -> CaseResult:
        return next(case for case in self.cases if (case.name, case.form) == (name, form))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "samebits.accept",
            "schema_version": SCHEMA,
            "numeric_profile": PROFILE,
            "passed": self.passed,
            "model": self.model,
            "provider": self.provider,
            "capabilities": self.capabilities,
            "provenance": self.provenance,
            "device": self.device,
            "environment": self.environment,
            "cases": [case.to_json() for case in self.cases],
            "golden": [dataclasses.asdict(judged) for judged in self.golden],
        }


def show(report: Report, console: Console) -> None:
    """A line per case, the digests of every boundary, then what is wrong and where it is wrong first."""
    said = ", ".join(f"{key} {value}" for key, value in report.provenance.items())
    console.print(
        f"[bold]{escape(report.model)}[/bold]  provider {escape(report.provider)} on {report.device}  ({escape(said)})",
        soft_wrap=True,
    )
    implemented = report.capabilities.get("implemented_operators")
    if implemented is not None:
        console.print(f"its own: {escape(', '.join(implemented)) or 'nothing'}", soft_wrap=True)
    console.print(_cases(report.cases))
    for family in dict.fromkeys(case.family for case in report.cases):
        table = _boundaries(family, [case for case in report.cases if case.family == family])
        if table is not None:
            console.print(table)
    for case in report.cases:
        _troubles(case, console)
    for judged in report.golden:
        colour = {"same": "green", "differs": "red", "absent": "yellow"}[judged.status]
        counted = f", {judged.compared} digests of the oracle" if judged.compared else ""
        console.print(f"golden {judged.file}: [{colour}]{judged.status}[/{colour}]{counted}", soft_wrap=True)
        for line in judged.lines:
            console.print(f"    {escape(line)}", soft_wrap=True)
    failed = sum(not case.passed for case in report.cases)
    count = f"{len(report.cases)} cases"
    console.print(f"[red]{failed} of {count} failed[/red]" if failed else f"[green]{count} passed[/green]")


def _cases(cases: Sequence[CaseResult]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("case", "form", "T", "D", "mode", "boundaries", "batches", "result"):
        table.add_column(heading, justify="right" if heading in ("T", "D", "boundaries", "batches") else "left")
    for case in cases:
        modes = [mode for mode in (case.fusion_mode, case.trainability) if mode not in ("unfused", "full")]
        table.add_row(
            case.name,
            case.form,
            str(case.rows),
            str(case.hidden),
            ", ".join(modes),
            f"{case.same} of {len(case.boundaries)}" if case.boundaries else "",
            str(case.compositions or ""),
            "[green]pass[/green]" if case.passed else "[red]FAIL[/red]",
        )
    return table


def _boundaries(family: str, cases: Sequence[CaseResult]) -> Table | None:
    """A column per case; forms with the same digests share one."""
    columns: dict[tuple[str, tuple[Boundary, ...]], list[str]] = {}
    for case in cases:
        if case.boundaries:
            columns.setdefault((case.name, case.boundaries), []).append(case.form)
    if not columns:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"\n{family} inputs", title_justify="left")
    table.add_column("boundary", no_wrap=True)
    forms = {form for names in columns.values() for form in names}
    for (name, _), shared in columns.items():
        table.add_column(
            name.removeprefix(f"{family}_") + ("" if set(shared) == forms else f" {', '.join(shared)}"), overflow="fold"
        )
    for boundary in dict.fromkeys(b.name for _, boundaries in columns for b in boundaries):
        cells = [next((_cell(b) for b in boundaries if b.name == boundary), "") for _, boundaries in columns]
        table.add_row(boundary, *cells)
    return table


def _cell(boundary: Boundary) -> str:
    ours, theirs = ((text or "nothing")[:DIGITS] for text in (boundary.oracle, boundary.provider))
    return theirs if boundary.verdict == "same" else f"[red]{theirs}, not {ours}[/red]"


def _troubles(case: CaseResult, console: Console) -> None:
    title = f"[red]{escape(case.name)}[/red]" + (f" ({case.form})" if case.form != "composed" else "")
    if case.reason:
        console.print(f"{title}: {escape(case.reason)}", soft_wrap=True)
    if case.divergence:
        console.print(f"{title} differs first at {escape(case.divergence)}", soft_wrap=True)
    for entry in case.varying:
        also = f" (and in {entry.also} more batches)" if entry.also else ""
        console.print(
            f"{title}: {escape(entry.boundary)} is not the same {escape(entry.company)}{also}: {escape(entry.what)}",
            soft_wrap=True,
        )
