"""Print an audit: a table of what was read, then each finding with its places, its reason and what to do."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebits.audit.lock import Comparison
from samebits.audit.rules import RULES
from samebits.audit.run import Report, Result

_COLOUR = {"clean": "green", "suspect": "yellow", "fail": "red", "error": "red"}
_SHOWN = 20


def show(result: Result, console: Console) -> None:
    own = bool(result.compilers)
    console.print(_own_table(result) if own else _foreign_table(result))
    findings = [(report, finding) for report in result.reports for finding in report.findings]
    for report, finding in findings:
        where = " ".join(part for part in (report.key.strip("/ ") if own else report.label, finding.function) if part)
        console.print(
            f"[{_COLOUR[finding.verdict]}]{finding.verdict}[/] [bold]{finding.rule}[/] in {escape(where)}"
            + (f": {finding.count} in {finding.source.upper()}" if finding.source != "file" else "")
        )
        for example in finding.examples:
            console.print(f"    {escape(example)}")
        if finding.note:
            console.print(f"    ({escape(finding.note)})")
    for name in dict.fromkeys(finding.rule for _, finding in findings):
        rule = RULES[name]
        console.print(f"\n[bold]{rule.name}[/] forbids {rule.forbids}: {rule.why}.")
        for title, text in (("judged", rule.judged), ("cannot know", rule.cannot_know), ("remedy", rule.remedy)):
            console.print(f"  {title}: {text}", markup=False)
    if any(report.sources == ("ptx",) for report in result.reports):
        console.print("\nWhere no cubin lies beside the PTX, registers and spills are unknown: ptxas decides on them.")
    if any(report.sources == ("sass",) for report in result.reports):
        console.print(
            "\nWhere no PTX lies beside the cubin, IEEE division, reciprocal and square root are recognised by "
            "pattern, and what the compiler removed or reassociated before cannot be seen."
        )
    bad = sum(not report.clean for report in result.reports)
    built = "; built by " + ", ".join(f"{name} {version}" for name, version in result.compilers) if own else ""
    console.print(f"\n{len(result.reports)} audited, {len(result.reports) - bad} clean, {bad} with findings{built}")


def show_comparison(comparison: Comparison, console: Console) -> None:
    if comparison.status == "same":
        console.print("lock: every kernel as recorded")
        return
    console.print(f"[red]lock: {'other compilers' if comparison.status == 'compiler' else 'machine code changed'}[/]")
    for line in comparison.lines[:_SHOWN]:
        console.print(f"  {line}", markup=False)
    if len(comparison.lines) > _SHOWN:
        console.print(f"  and {len(comparison.lines) - _SHOWN} more; --json has them all")
    if comparison.status == "changed":
        console.print("  if this is meant, rewrite it with samebits audit --write-lock and commit the diff")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _own_table(result: Result) -> Table:
    """One row per kernel, one column per architecture."""
    arches = list(dict.fromkeys(report.arch.rstrip("a") for report in result.reports if report.arch))
    rows: dict[tuple[str, str, str], dict[str, Report]] = {}
    for report in result.reports:
        rows.setdefault((report.op, report.backend, report.label), {})[report.arch.rstrip("a")] = report
    title = "Audit of machine code (registers per thread, static shared bytes)"
    table = _table(title, "operator", "backend", "kernel", *arches)
    for (op, backend, label), by_arch in rows.items():
        cells = [_cell(by_arch.get(arch) or by_arch.get("")) for arch in arches]
        table.add_row(op, backend, escape(label), *cells)
    return table


def _foreign_table(result: Result) -> Table:
    table = _table("Audit of machine code", "file", "arch", "judged", "verdict")
    for report in result.reports:
        table.add_row(escape(report.label), report.arch, " + ".join(report.sources), _cell(report))
    return table


def _cell(report: Report | None) -> str:
    if report is None:
        return ""
    used = report.resources
    size = f" {used.registers} reg" + (f", {used.shared} B" if used.shared else "") if used else ""
    return f"[{_COLOUR[report.verdict]}]{report.verdict}[/]{size}"
