"""``samebits invariance``: the first module of a model whose rows depend on the batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.errors import UserError


def invariance(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="file.py:callable or module:callable that returns (model, inputs)."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the callable.")] = None,
    batch_axis: Annotated[int, typer.Option(help="The axis of the inputs that counts the rows.")] = 0,
    sequence_axis: Annotated[
        int | None, typer.Option(help="The axis that counts the positions; pads the sequences too.")
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(help="An input that has no rows, whatever its shape; by key or number. Repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="repeat, split, permute, pad or pad_sequence. Repeatable.")
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="Record only modules of this name pattern. Repeatable.")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The gradients too.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random generators before each run.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the findings as JSON.")
    ] = None,
) -> None:
    """Run a model on a batch, on parts of it, permuted, padded and again; name the first module that breaks each.

    Exit code 0: every row keeps its bits, 1: one does not, 2: something could not be compared, or wrong use.
    """
    from samebits.cli import output
    from samebits.verify.invariance import invariance as examine
    from samebits.verify.invariance import show
    from samebits.verify.trace import running

    output.require_folder(json_file)
    with _the_users_code():
        model, inputs = running.make(target, arguments or [])
    if callable(inputs):
        raise UserError(f"{target} must return (model, inputs): a function cannot be given another batch")
    with _the_users_code():
        found = examine(
            model,
            inputs,
            batch_axis=batch_axis,
            sequence_axis=sequence_axis,
            shared=shared or (),
            only=only or (),
            backward=backward,
            modules=module or (),
            seed=seed,
        )
    for line in show.lines(found):
        typer.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    raise typer.Exit(found.exit_code)


@contextmanager
def _the_users_code() -> Iterator[None]:
    """What it raises by itself is not a broken promise: exit code 2, not 1."""
    try:
        yield
    except (ValueError, OSError, ImportError):  # said as they are
        raise
    except Exception as error:
        raise UserError(f"the model cannot be run: {type(error).__name__}: {error}") from error
