"""Print a comparison: what differs first, what each site adds, why, and what the batch changes."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebits.models.deepseek_v4.causes import total
from samebits.models.deepseek_v4.compare import LayerComparison


def show(comparison: LayerComparison, console: Console) -> None:
    console.print(
        f"[bold]{escape(comparison.title)}[/bold], transformers {comparison.transformers}, {comparison.device}"
    )
    first = comparison.first
    console.print(f"  first difference: {escape(str(first)) if first else 'none, every boundary has the same bits'}")
    last = comparison.chained[-1]
    if first is not None and last.name != first.name:
        console.print(f"  after the last:   {escape(str(last))}")
    console.print(_sites(comparison))
    for habit, moved in total(comparison.causes).items():
        console.print(f"  {moved} elements moved because the class {escape(habit)}")
    unexplained = sum(cause.unexplained for cause in comparison.causes)
    elements = sum(cause.elements for cause in comparison.causes)
    colour = "yellow" if unexplained else "green"
    console.print(f"  [{colour}]{unexplained} of {elements} elements unexplained[/{colour}]")
    for split in comparison.split:
        console.print(f"  one sequence alone and in the batch, {escape(str(split))}")
    for finding in comparison.findings:
        console.print(f"  {escape(finding.question)} [bold]{escape(finding.answer)}[/bold]")
    for check in comparison.checks:
        verdict = "[green]holds[/green]" if check.passed else f"[red]broken[/red]: {escape(check.detail)}"
        console.print(f"  {check.name}: {verdict}")


def _sites(comparison: LayerComparison) -> Table:
    """Each site on the unpatched inputs, and how many rows vary with the batch, ours beside theirs."""
    table = Table(title="  sites on the unpatched inputs", title_justify="left", box=None, pad_edge=False)
    for column in ("  boundary", "differing", "of", "max abs", "rows that vary: ours", "the class"):
        table.add_column(column, justify="left" if column.startswith(" ") else "right")
    cells: dict[str, dict[bool, str]] = {}
    for check in comparison.rows:
        cells.setdefault(check.name, {})[check.patched] = f"{check.varying} of {check.rows}"
    for entry in comparison.isolated:
        gap = "" if entry.max_abs is None else f"{entry.max_abs:.2g}"
        found = cells.get(entry.name, {})
        table.add_row(
            f"  {entry.name}", str(entry.differing), str(entry.elements), gap, found.get(True, ""), found.get(False, "")
        )
    return table
