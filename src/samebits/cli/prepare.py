"""``samebits prepare``: the few tensors of a published checkpoint that a replay needs, verified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.errors import UserError

MODELS = ("minimax-h3",)


def prepare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="minimax-h3.")],
    out: Annotated[Path, typer.Option(help="Folder for the verified tensors.")],
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Take the checkpoint's files from here; no network.")
    ] = None,
    download_dir: Annotated[
        Path | None, typer.Option(help="Where downloaded files are kept. Default: the folder hf in --out.")
    ] = None,
    block: Annotated[
        bool, typer.Option("--block", help="Also the attention and FFN of block 0, in a second file.")
    ] = False,
) -> None:
    """Download the pinned revision, verify the SHA-256 of every file and every tensor, and write the tensors needed.

    Nothing is written unless all of it is what the manifest says. Exit code 0: written, 1: something is not the published
    bytes, 2: wrong use, or a file could not be had.
    """
    if model not in MODELS:
        raise UserError(f"no weights are pinned for {model!r}; choose {', '.join(MODELS)}")
    if source is not None and download_dir is not None:
        raise UserError("--from takes files that are here, --download-dir keeps files that are fetched; choose one")
    from samebits.models.minimax_h3 import prepare as preparing
    from samebits.models.minimax_h3.manifest import ManifestError

    try:
        fetch = preparing.from_folder(source) if source is not None else preparing.from_hub(download_dir or out / "hf")
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from error
    try:
        preparing.prepare(out, fetch, block=block, say=typer.echo)
    except ManifestError as error:
        typer.echo(f"samebits prepare: {error}", err=True)
        raise typer.Exit(1) from None
