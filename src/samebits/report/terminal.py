"""The tables of a page on a terminal, so that both say the same."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table as RichTable

from samebits.cli import output
from samebits.report.parts import Cell, Table

_COLOURS = {"good": "green", "bad": "red", "none": "yellow"}


def rich_table(table: Table) -> RichTable:
    made = output.table(
        escape(table.title), *table.columns, right=tuple(table.columns[i] for i in sorted(table.numeric))
    )
    made.columns[0].no_wrap = True
    for row in table.rows:
        made.add_row(*map(_text, row))
    return made


def _text(cell: Cell) -> str:
    colour = _COLOURS.get(cell.state)
    return f"[{colour}]{escape(cell.text)}[/{colour}]" if colour and cell.text else escape(cell.text)
