"""Print a comparison: what differs first, what each replaced module adds, why, and what a row alone does."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebits.models.deepseek_v4.compare import LayerComparison
from samebits.models.deepseek_v4.rows import FROM_STREAMS


def show(comparison: LayerComparison, console: Console) -> None:
    console.print(
        f"[bold]{escape(comparison.title)}[/bold], transformers {comparison.transformers}, {comparison.device}"
    )
    first = comparison.first
    console.print(f"  first difference: {escape(str(first)) if first else 'none, every boundary has the same bits'}")
    last = comparison.chained[-1]
    if first is not None and last.name != first.name:
        console.print(f"  after the last:   {escape(str(last))}")
    console.print(_isolated(comparison))
    for cause in comparison.causes:
        for step in cause.steps:
            console.print(f"  {cause.module}: {step.moved} of {cause.elements} because the class {escape(step.habit)}")
        if cause.unexplained:
            console.print(f"  [yellow]{cause.module}: {cause.unexplained} unexplained[/yellow]")
    console.print(_rows(comparison))
    for split in comparison.split:
        console.print(f"  one sequence alone and in the batch, {escape(str(split))}")
    for finding in comparison.findings:
        console.print(f"  {escape(finding.question)} [bold]{escape(finding.answer)}[/bold]")
    for check in comparison.checks:
        verdict = "[green]holds[/green]" if check.passed else f"[red]broken[/red]: {escape(check.detail)}"
        console.print(f"  {check.name}: {verdict}")


def _isolated(comparison: LayerComparison) -> Table:
    table = Table(title="  replaced modules on the unpatched inputs", title_justify="left", box=None, pad_edge=False)
    for column in ("  boundary", "differing", "of", "max abs", "max ulp"):
        table.add_column(column, justify="left" if column.startswith(" ") else "right")
    for entry in comparison.isolated:
        gap = "" if entry.max_abs is None else f"{entry.max_abs:.2g}"
        ulp = "" if entry.max_ulp is None else str(entry.max_ulp)
        table.add_row(f"  {entry.name}", str(entry.differing), str(entry.elements), gap, ulp)
    return table


def _rows(comparison: LayerComparison) -> Table:
    """Rows that vary when they run alone, ours beside theirs."""
    table = Table(title="  rows that vary when they run alone", title_justify="left", box=None, pad_edge=False)
    for column in ("  boundary", "the row was given", "patched", "unpatched"):
        table.add_column(column, justify="left" if column in ("  boundary", "the row was given") else "right")
    cells: dict[tuple[str, str], dict[bool, str]] = {}
    for check in comparison.rows:
        where = (f"{check.module}.{check.boundary}", check.given)
        cells.setdefault(where, {})[check.patched] = f"{check.varying} of {check.rows}"
    for (name, given), found in sorted(cells.items(), key=lambda item: item[0][1] == FROM_STREAMS):
        table.add_row(f"  {name}", given, found.get(True, ""), found.get(False, ""))
    return table
