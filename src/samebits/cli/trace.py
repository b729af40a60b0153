"""``samebits trace``: record what a model computes, as digests in execution order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.errors import UserError


def trace(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A script, or file.py:callable or module:callable that returns (model, inputs) or (model, function).",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script or the callable.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write; ranks add their number.")] = Path(
        "run.trace"
    ),
    module: Annotated[list[str] | None, typer.Option(help="Only modules of this name pattern. Repeatable.")] = None,
    rows: Annotated[int, typer.Option(help="Record digests of rows; so many axes count them.")] = 0,
    batch_axis: Annotated[int, typer.Option(help="The first of these axes.")] = 0,
    tensors: Annotated[
        list[str] | None, typer.Option(help="Keep full tensors of modules of this name pattern. Repeatable.")
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="With inputs: run the backward of the sum of the outputs too.")
    ] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Record the names of what each call launched.")] = False,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", help="Read a tensor again only when torch counted a write to it.")
    ] = True,
    passed_over: Annotated[
        bool,
        typer.Option("--passed-over", help="Of a patched model, also run what it passes over, for the trace alone."),
    ] = False,
) -> None:
    """Record digests of everything that a model's modules take and return, forward and backward, without changing a bit.

    A script is run as a program, and every model that it calls is recorded. Exit code 0: recorded, 1: the run ended in an error
    (the trace up to there is written), 2: wrong use.
    """
    from samebits.verify.trace import running
    from samebits.verify.trace import trace as record

    options = {
        "modules": module or (),
        "tensors": tensors or (),
        "rows": rows,
        "batch_axis": batch_axis,
        "kernels": kernels,
        "reuse": reuse,
        "passed_over": passed_over,
    }
    if running.is_script(target):
        if not Path(target).is_file():
            raise UserError(f"no file {target}")
        if backward:
            raise UserError("--backward is for a callable; a script runs its own backward")
        model, run = None, lambda: running.run_script(Path(target), arguments or [])
    else:
        model, inputs = running.make(target, arguments or [])
        run = running.runner(model, inputs, backward)
    recording = record(model, out, **options)  # type: ignore[arg-type]
    failed: BaseException | None = None
    try:
        with recording:
            run()
    except (Exception, SystemExit) as error:
        if not hasattr(recording, "trace"):
            raise
        failed = error
    made = recording.trace
    calls = sum(event.kind in ("module", "operator") for event in made.events)
    typer.echo(f"{made.path}: {calls} calls, {len(made.parameters())} parameters, {len(made.events)} events")
    if failed is not None:
        where = made.stopped["path"] if made.stopped else None
        place = f" in {where}" if where else ""
        typer.echo(f"the run ended{place} by {type(failed).__name__}: {' '.join(str(failed).split())}", err=True)
        raise typer.Exit(1)
    if not calls:
        raise UserError("no call of a torch.nn.Module was seen; the trace is empty")
