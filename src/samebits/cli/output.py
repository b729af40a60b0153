"""One console and one table style for every command."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samebits.cli.errors import UserError


@functools.cache
def console() -> Console:
    """Wide enough off a terminal that no column of a log is cut."""
    probe = Console()
    return probe if probe.is_terminal else Console(width=160)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def require_folder(path: Path | None) -> None:
    """That a file can be written, asked before a long run. UserError: its folder does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"no folder {path.parent} to write {path.name} in")
