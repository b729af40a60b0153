"""``samebits compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits import catalogue
from samebits.catalogue import Declared
from samebits.cli import arguments
from samebits.cli.errors import UserError
from samebits.contract import OpSpec

if TYPE_CHECKING:
    from samebits.compare.request import Request


def compare(
    operator: Annotated[str, typer.Argument(metavar="OP", help="Operator name, see `samebits list`.")],
    contract: Annotated[str | None, typer.Option(help="Contract of ours; default: the published one.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of ours; default: the preferred one that is here.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: the GPU if there is one.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Size of an axis, e.g. D=4096. Repeatable.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows T of the timed batches. Repeatable.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller batches, one seed; no torch.compile on a CPU.")
    ] = False,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Run the peers that torch.compile compiles.")
    ] = None,
    times: Annotated[bool, typer.Option("--times/--no-times", help="Measure time and memory too.")] = True,
    peers: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="A file with PEERS, in place of the operator's own.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "--json", metavar="FILE.json", help="Write the report.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw verdicts and times.")] = None,
) -> None:
    """Compare an operator with every known peer: bits, batch invariance, repeatability, error, time, memory.

    Exit code 0: ours kept its promises and every peer that is here was compared; 1: not so; 2: wrong use. A peer that is not
    batch-invariant, or has other bits than ours, is a finding and no failure.
    """
    from samebits.cli import output
    from samebits.compare import show
    from samebits.compare.run import run as of_rows

    for path in (out, figure):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: the folder {path.parent} does not exist")
    if figure is not None:
        import matplotlib  # noqa: F401 - a missing one must show before minutes of work
    request = requested(operator, contract, backend, device, size or [], rows or [], quick, compiled, times, peers)
    run = catalogue.part(operator, "comparison").run if operator in catalogue.of_sequences() else of_rows
    report = run(request, _progress())
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    if figure is not None:
        from samebits.compare.figure import draw

        draw(report, figure)
    console = output.console()
    console.print(show.table_of(report))
    for note in show.notes(report):
        console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)
    for text in report["failures"]:
        console.print(f"FAILED  {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not report["passed"]:
        raise typer.Exit(1)


def requested(
    operator: str,
    contract: str | None,
    backend: str | None,
    device: str | None,
    size: list[str],
    rows: list[int],
    quick: bool,
    compiled: bool | None,
    times: bool,
    peers: Path | None,
) -> Request:
    """The request, with everything that was left open decided. UserError or ValueError for what cannot be."""
    import dataclasses

    from samebits.compare import scale
    from samebits.compare.request import Request

    spec = catalogue.declared(operator)
    name = spec.contract(contract).name
    where = _device(device)
    kind = where.partition(":")[0]
    own = None if isinstance(spec, OpSpec) else catalogue.part(operator, "comparison")
    chosen = scale.default(kind, quick) if own is None else own.scale(kind, quick)
    if rows:
        chosen = dataclasses.replace(chosen, timed=arguments.rows(rows))
    if compiled is not None:
        chosen = dataclasses.replace(chosen, compile=compiled)
    given = arguments.sizes(size)
    sizes = _sizes(spec, given, chosen.widest) if isinstance(spec, OpSpec) else own.sizes(given, kind)  # type: ignore[union-attr]
    known = [declared.name for declared in spec.backends]
    if backend is not None and backend not in known:
        raise UserError(f"--backend {backend!r}: {spec.name} has {', '.join(known)}")
    request = Request(
        op=operator,
        contract=name,
        backend=_backend(operator, name, backend, where, spec, sizes),
        device=where,
        sizes=sizes,
        scale=chosen,
        peers_file=None if peers is None else str(peers),
        latency=times,
    )
    if own is None and not request.peers():
        raise UserError(f"{operator} declares no peer; give a file with --peers")
    return request


def _device(asked: str | None) -> str:
    import torch

    here = torch.cuda.is_available()
    if asked is None:
        return "cuda" if here else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise UserError(f"--device {asked!r}: expected cpu, cuda or cuda:N")
    if kind == "cuda" and not (here and int(index or 0) < torch.cuda.device_count()):
        raise UserError(f"--device {asked!r}: there is no such GPU here, or torch cannot use it (see `samebits env`)")
    return asked


def _sizes(spec: OpSpec, given: dict[str, int], widest: int | None) -> dict[str, int]:
    from samebits.verify.operators import resolve_sizes

    tuned = {axis: values[0] for axis, values in spec.tuned if values}
    free = {}
    for axis, least, _ in spec.size_limits:
        usual = tuned.get(axis, least)
        free[axis] = usual if widest is None else max(least, min(usual, widest))
    return resolve_sizes(spec, spec.fitted(free) | given)


def _backend(
    operator: str, contract: str, asked: str | None, device: str, spec: Declared, sizes: dict[str, int]
) -> str:
    import torch

    from samebits.verify.operators import OperatorSubject

    where = torch.device(device)
    if not isinstance(spec, OpSpec):
        return str(catalogue.part(operator, "comparison").backend(contract, asked, where, sizes))
    free = {axis: sizes[axis] for axis, _, _ in spec.size_limits}
    subject = OperatorSubject(operator, contract, asked, where, dtype=None, rows=1, seed=0, sizes=free)
    return subject.chosen_backend()


def _progress() -> Any:
    """One line per contestant on standard error, where somebody waits for it."""
    from rich.console import Console

    console = Console(stderr=True)
    return lambda name: console.print(f"  {name} ...", style="dim", highlight=False, markup=False)
