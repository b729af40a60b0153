"""``samebits accept``: hold a provider of a model's operators to the bytes of the oracle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits.cli.errors import UserError

if TYPE_CHECKING:
    from samebits.accept import Report

STDOUT = "-"


def accept(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="deepseek-v4: its hyper-connection block.")],
    provider: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MODULE:CLASS",
            help="cuda, triton, operators, reference, stub, module:Class or path/file.py:Class. Default: our best here.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    cases: Annotated[str | None, typer.Option(metavar="A,B", help="Only these cases.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the report as JSON; - prints it instead.")
    ] = None,
    write_golden: Annotated[
        bool,
        typer.Option(
            "--write-golden", help="Record the oracle's digests of this device in tests/golden, if all passes."
        ),
    ] = False,
) -> None:
    """Run the acceptance cases of a model's layer: every boundary of a block, forward and backward, must have the oracle's
    bytes on the same device, and every row must have the same bytes alone as in the batch.

    Exit code 0: all cases passed, 1: one did not, 2: wrong use.
    """
    from samebits import accept as acceptance
    from samebits import environment
    from samebits.accept.report import show
    from samebits.cli import output

    root = environment.checkout()
    if write_golden and root is None:
        raise UserError("--write-golden: this is no checkout, there is no tests/golden to write to")
    if write_golden and cases is not None:
        raise UserError("--write-golden records all cases; leave --cases out")
    names = None if cases is None else [name.strip() for name in cases.split(",") if name.strip()]
    with _progress() as progress:
        report = acceptance.accept(model, provider, device, names, progress)
    if json_file == STDOUT:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(report, output.console())
    if json_file is not None and json_file != STDOUT:
        Path(json_file).write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if write_golden and root is not None:
        _write_golden(report, root)
    raise typer.Exit(report.exit_code)


def _write_golden(report: Report, root: Path) -> None:
    """Only from a run whose cases passed; a recorded digest that differs is what is being replaced."""
    import torch

    from samebits.accept import golden

    if not all(case.passed for case in report.cases):
        typer.echo("nothing recorded: not every case passed", err=True)
        return
    device = torch.device(report.device)
    file = golden.path(root, device)
    count = golden.write(file, report.oracle, device)
    typer.echo(f"recorded {count} digests in {file.relative_to(root)}", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar where a person watches; nothing in a log."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("accepting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
