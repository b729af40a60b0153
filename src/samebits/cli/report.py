"""``samebits report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.errors import UserError


def report(
    check: Annotated[list[Path] | None, typer.Option(help="JSON of `samebits check`; may be repeated.")] = None,
    audit: Annotated[Path | None, typer.Option(help="JSON of `samebits audit`.")] = None,
    model: Annotated[list[Path] | None, typer.Option(help="JSON of a model comparison; may be repeated.")] = None,
    bench: Annotated[list[Path] | None, typer.Option(help="JSON lines of `samebits bench`; may be repeated.")] = None,
    example: Annotated[
        Path | None, typer.Option(help="JSON of a check that is shown for its failure and counts nowhere.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of index.html.")] = Path("report"),
) -> None:
    """Write one self-contained HTML page. A part that was not run is shown as such, with the command that produces it."""
    from samebits.report import load, write

    try:
        recorded = load.load(check or [], audit, model or [], bench or [], example)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    typer.echo(str(write.write(recorded, out)))
