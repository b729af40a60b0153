"""What a check found, as data and as a table."""

from __future__ import annotations

import dataclasses
import math
import platform
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Status = Literal["pass", "fail", "not run", "n/a"]
"""``not run`` could not run and is not a pass. ``n/a`` was left out by an option or is promised by nobody."""

_COLOURS = {"pass": "green", "fail": "red", "not run": "yellow", "n/a": "dim"}


@dataclass(frozen=True)
class Failure:
    """One broken promise: along which axis, in which result, where first, and how to see it again."""

    axis: str
    label: str
    """E.g. ``batch size 1 vs 70``."""
    result: str
    what: str
    """First difference or worst error, in words."""
    reproduce: str
    evidence: dict[str, Any]
    """The same as fields: row, column, both bit patterns, counts."""
    also: int = 0
    """How many more variations of this axis failed for this result."""


@dataclass(frozen=True)
class CheckResult:
    name: str
    status: Status
    summary: str
    comparisons: int = 0
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    candidate: str
    judged_against: str
    options: dict[str, Any]
    """Everything that decides the outcome: contract, backend, device, dtype, seed, rows, sizes."""
    environment: dict[str, str]
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Something was judged, and nothing failed or could not run."""
        found = {check.status for check in self.checks}
        return "pass" in found and not found & {"fail", "not run"}

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def check(self, name: str) -> CheckResult:
        return next(check for check in self.checks if check.name == name)

    def status(self) -> dict[str, Status]:
        return {check.name: check.status for check in self.checks}

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; a float that JSON has no number for (NaN, infinity) becomes a string."""
        return {"kind": "samebits.check", "passed": self.passed, **_plain(dataclasses.asdict(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device_name": name,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def show(report: Report, console: Console | None = None) -> None:
    """Print the report: one line per check, then each failure with its place and its reproduction."""
    console = console or Console()
    shown = ", ".join(f"{key} {value}" for key, value in report.options.items() if value not in (None, {}, []))
    console.print(f"[bold]{escape(report.candidate)}[/bold]  {escape(shown)}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "result", "what was seen"):
        table.add_column(heading)
    for check in report.checks:
        colour = _COLOURS[check.status]
        table.add_row(check.name, f"[{colour}]{check.status}[/{colour}]", escape(check.summary))
    console.print(table)
    for check in report.checks:
        for failure in check.failures:
            also = f" (and {failure.also} more along this axis)" if failure.also else ""
            console.print(
                f"[red]{check.name}[/red]: {escape(failure.result)}, {escape(failure.label)}{also}", soft_wrap=True
            )
            console.print(f"    {escape(failure.what)}", soft_wrap=True)
            console.print(f"    reproduce: {escape(failure.reproduce)}", soft_wrap=True, highlight=False)
    for check in report.checks:
        for note in check.notes:
            console.print(f"[dim]{check.name}: {escape(note)}[/dim]", soft_wrap=True)
    console.print(f"accuracy judged against: {escape(report.judged_against)}", soft_wrap=True)
