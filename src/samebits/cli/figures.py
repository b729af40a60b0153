"""``samebits figures``, and what a replay leaves in its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from samebits.report.pages import TablesPage

FOLDER = "figures"


def figures(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="JSON of `samebits replay`.")],
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path(FOLDER),
    form: Annotated[str, typer.Option("--format", help="png, pdf or svg.")] = "png",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This figure alone, e.g. nodes; may be repeated.")
    ] = None,
) -> None:
    """Draw a recorded replay for print: figures as wide as a column or a page, and captions.txt.

    conditioning, block: per node the elements that differ from the peer (chained and isolated), rows that depend on the batch, and
    the distance from FP64, of both; the same of gradients; latencies. model: along its depth. generation: along its steps.
    """
    from samebits.report import load, plots

    if form not in plots.FORMATS:
        raise UserError(f"--format {form}: choose {', '.join(plots.FORMATS)}")
    for path in plots.write(load.replay(record), out, form, only):
        typer.echo(str(path))


def leave(
    content: dict[str, Any],
    page: TablesPage,
    out: Path | None,
    json_file: Path | None,
    console: Console,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a replay where it was asked for: the record to ``json_file``; record, page, ``files`` and figures to ``out``.

    The page carries the figures with it.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if json_file is not None:
        json_file.write_text(text)
    if out is None:
        return
    from samebits.report import plots
    from samebits.report.pages import Picture, tables_page

    out.mkdir(parents=True, exist_ok=True)
    for name, made in {"replay.json": text, **(files or {})}.items():
        (out / name).write_text(made)
    pictures: list[Picture] = []
    try:
        plots.write(content, out / FOLDER)
        for plot in plots.shown(content):
            pictures.append(Picture(plot.name, plot.caption, (out / FOLDER / f"{plot.name}.png").read_bytes()))
        said = f"figures: {out / FOLDER}"
    except ModuleNotFoundError as error:
        cure = f"pip install 'samebits[report]', then samebits figures {out / 'replay.json'}"
        said = f"no figures, {error.name} is not installed: {cure}"
    (out / "index.html").write_text(tables_page(dataclasses.replace(page, pictures=pictures)))
    console.print(f"report: {out / 'index.html'}; {said}", highlight=False, markup=False)
