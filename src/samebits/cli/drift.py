"""``samebits drift``: the first operation that differs between two traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.errors import UserError


def drift(
    a: Annotated[Path, typer.Argument(metavar="A.trace", help="A trace, see `samebits trace`.")],
    b: Annotated[Path, typer.Argument(metavar="B.trace", help="The trace that is held against it.")],
    rows: Annotated[
        Path | None, typer.Option(metavar="MAP", help="JSON that says which row of A is which row of B.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the findings as JSON.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write them as one self-contained page.")
    ] = None,
) -> None:
    """Name the first operation whose inputs agree and whose outputs do not, forward and backward.

    Exit code 0: the same bits, 1: drift, 2: the traces cannot be compared.
    """
    from samebits.verify.drift import drift as compare
    from samebits.verify.drift import page, read_rows, show

    for path in (a, b, *([rows] if rows is not None else [])):
        if not path.is_file():
            raise UserError(f"no file {path}")
    try:
        found = compare(a, b, None if rows is None else read_rows(rows))
    except IndexError as error:
        raise UserError(str(error)) from error
    for line in show.lines(found):
        typer.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    if html_file is not None:
        page.write(found, html_file)
    raise typer.Exit(found.exit_code)
