"""``samebits bench``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from samebits import catalogue, registry
from samebits.bench.case import DIRECTIONS, ROWS, Case, Direction, sweep
from samebits.catalogue import Declared
from samebits.cli import arguments
from samebits.cli.errors import UserError
from samebits.contract import OpSpec

if TYPE_CHECKING:
    from samebits.bench.run import Settings

QUICK_COMPILE_SECONDS = 25.0
FULL_COMPILE_SECONDS = 900.0


def bench(
    operator: Annotated[str | None, typer.Argument(help="Operator name, see `samebits list`.")] = None,
    quick: Annotated[bool, typer.Option(help="Only the cases that the operator's speed targets speak about.")] = False,
    backend: Annotated[list[str] | None, typer.Option(help="Backends to time; default: cuda and triton.")] = None,
    contract: Annotated[list[str] | None, typer.Option(help="Contracts to time; default: all.")] = None,
    direction: Annotated[list[str] | None, typer.Option(help="fwd, bwd or fwd+bwd; default: all three.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows T; give it more than once for several.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="Size of an axis, e.g. D=4096; default: the tuned sizes.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Time the peers too.")] = True,
    seconds: Annotated[float, typer.Option(help="Begin no further case after this long.")] = 3600.0,
    out: Annotated[Path | None, typer.Option(help="Write JSON lines here.")] = None,
    targets: Annotated[
        list[Path] | None, typer.Option(help="Measure nothing: judge these results files by the targets.")
    ] = None,
) -> None:
    """Time an operator beside its peers: CUDA-graph replay, cold L2, bits verified in the same run."""
    from samebits.cli import output

    if targets:
        _judge(targets, operator)
        return
    if operator is None:
        raise UserError("name an operator (see `samebits list`), or give --targets FILE")
    spec = catalogue.declared(operator)
    cases = chosen_cases(spec, quick, direction, rows, size)
    contracts = (
        tuple(spec.contract(name).name for name in contract) if contract else tuple(c.name for c in spec.contracts)
    )
    backends = _backends(spec, backend)
    _need_gpu()
    from samebits.bench.run import Settings

    compile_seconds = QUICK_COMPILE_SECONDS if quick else FULL_COMPILE_SECONDS
    lines = _run(spec, cases, Settings(contracts, backends, peers, compile_seconds, seconds), out)
    _print(lines)
    if out is not None:
        output.console().print(f"{len(lines)} lines in {out}")
    if any("skipped" not in line and not line["bits_checked"] for line in lines):
        output.console().print("[red]not every output had its bits verified; see the notes[/red]")
        raise typer.Exit(1)


def chosen_cases(
    spec: Declared, quick: bool, direction: list[str] | None, rows: list[int] | None, size: list[str] | None
) -> tuple[Case, ...]:
    for name in direction or []:
        if name not in DIRECTIONS:
            raise UserError(f"--direction {name!r}: expected one of {', '.join(DIRECTIONS)}")
    directions = cast("tuple[Direction, ...]", tuple(direction or DIRECTIONS))
    sizes = arguments.sizes(size or [])
    if not isinstance(spec, OpSpec):
        counts = arguments.rows(rows or [])
        found: tuple[Case, ...] = catalogue.part(spec.name, "measure").cases(quick, directions, counts, sizes)
        return found
    free = {axis for axis, _ in spec.tuned}
    for axis in sizes:
        if axis not in free:
            raise UserError(
                f"--size {axis}={sizes[axis]}: {spec.name} can only be sized along {', '.join(sorted(free))}"
            )
    if not quick:
        return sweep(spec, arguments.rows(rows) if rows else ROWS, sizes, directions)
    from samebits.bench.targets import quick_cases

    return tuple(
        case
        for case in quick_cases(spec.name)
        if case.direction in directions
        and (not rows or case.rows in rows)
        and all(dict(case.sizes).get(axis) == value for axis, value in sizes.items())
    )


def _backends(spec: Declared, asked: list[str] | None) -> tuple[str, ...]:
    known = [b.name for b in spec.backends]
    for name in asked or []:
        if name not in known:
            raise UserError(f"--backend {name!r}: {spec.name} has {', '.join(known)}")
    return tuple(asked) if asked else tuple(name for name in known if name != "reference")


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "samebits bench needs an NVIDIA GPU: this machine has none, or torch cannot use it (see `samebits env`)"
        )


def _run(spec: Declared, cases: tuple[Case, ...], settings: Settings, out: Path | None) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from samebits import environment
    from samebits.bench import results
    from samebits.bench.run import run
    from samebits.bench.timing import CudaMachine

    machine = CudaMachine()
    told = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=told, disable=not told.is_terminal) as progress:
        task = progress.add_task(spec.name, total=len(cases))

        def begin(case: Case) -> None:
            progress.update(task, description=case.title, completed=cases.index(case))
            if not told.is_terminal:
                print(f"bench {case.title}", flush=True)

        measure = functools.partial(run, registry.operator(spec.name)) if isinstance(spec, OpSpec) else _of(spec)
        lines = results.gather(out, measure(cases, settings, machine, environment.collect(), begin))
        progress.update(task, completed=len(cases))
    return lines


def _of(spec: Declared) -> Callable[..., Iterator[dict[str, Any]]]:
    measure: Callable[..., Iterator[dict[str, Any]]] = catalogue.part(spec.name, "measure").run
    return measure


def _print(lines: list[dict[str, Any]]) -> None:
    from samebits.bench import show, targets
    from samebits.cli import output

    console = output.console()
    console.print(show.measured(lines))
    for note in show.notes(lines):
        console.print(f"  {note}", highlight=False, markup=False)
    verdicts, _ = targets.judge(lines)
    if verdicts:
        console.print(show.judged(verdicts, []))


def _judge(files: list[Path], operator: str | None) -> None:
    from samebits.bench import results, show, targets
    from samebits.cli import output

    lines = [line for line in results.read(files) if operator in (None, line["op"])]
    if not lines:
        raise UserError(f"no results{'' if operator is None else f' of {operator}'} in {', '.join(map(str, files))}")
    verdicts, unheard = targets.judge(lines)
    output.console().print(show.judged(verdicts, unheard))
    if unheard or any(verdict.met is not True for verdict in verdicts):
        raise typer.Exit(1)
