"""``samebits audit``: judge machine code by the rules of the contracts, without a GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits import catalogue
from samebits.cli.errors import UserError

if TYPE_CHECKING:
    from samebits.audit.lock import Comparison
    from samebits.audit.run import Progress, Result

LOCK = Path("tests") / "golden" / "audit.lock.json"


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            help="An operator, a .cubin or .ptx file, or a folder such as a Triton cache. Default: every operator."
        ),
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="Architecture to compile for, e.g. sm_90; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    write_lock: Annotated[
        bool,
        typer.Option(
            "--write-lock",
            help="Compile what changed since the lock was written, and record it; with an operator, its kernels alone.",
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --write-lock: compile what did not change too.")
    ] = False,
    check_lock: Annotated[
        bool, typer.Option("--check-lock", help="Compile and compare with the recorded fingerprints and opcode counts.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", help="Foreign files: fma, a rule, or an instruction such as rsqrt.approx.f32; may be repeated."
        ),
    ] = None,
) -> None:
    """Look in PTX and SASS for float atomics, contraction, approximations, flushing, spills and tensor cores.

    Exit code 0: clean. 1: findings, or the lock differs. 2: cannot be done.
    """
    from samebits.audit import compile as compiling
    from samebits.audit import show
    from samebits.cli import output

    _refuse_nonsense(write_lock, everything, check_lock, target, arch, allow or [])
    arches = tuple(arch) if arch else compiling.ARCHES
    ops = None if target is None else (target,)
    comparison, complete = None, True
    try:
        if write_lock:
            result, complete = _write_lock(everything, target)
        else:
            numbers = sorted({compiling.capability(name) for name in arches})
            result = _run(target, [f"sm_{n}" for n in numbers], bool(arch), allow or [], check_lock)
            show.show(result, output.console())
        if check_lock:
            from samebits.audit import lock

            comparison = lock.compare(_lock_path(), result, ops, arches)
    except ValueError as error:
        raise UserError(str(error)) from error
    if comparison is not None:
        show.show_comparison(comparison, output.console())
    if json is not None:
        _write_json(json, result, comparison)
    if not (result.clean and complete) or (comparison is not None and comparison.status != "same"):
        raise typer.Exit(1)


def _refuse_nonsense(
    write_lock: bool, everything: bool, check_lock: bool, target: str | None, arch: list[str] | None, allow: list[str]
) -> None:
    if write_lock and check_lock:
        raise UserError("--write-lock and --check-lock exclude each other")
    if write_lock and (arch or allow):
        raise UserError("--write-lock records all architectures, by the contracts alone: no --arch, no --allow")
    if write_lock and target is not None and target not in catalogue.names():
        raise UserError(f"--write-lock: {target!r} is no operator ({', '.join(catalogue.names())})")
    if everything and not write_lock:
        raise UserError("--all says what --write-lock compiles; without it everything is compiled anyway")


def _run(target: str | None, arches: list[str], arch_given: bool, allow: list[str], lock: bool) -> Result:
    from samebits.audit import limits, listing, run
    from samebits.cli import output

    ours = target is None or target in catalogue.names()
    if not ours:
        path = Path(str(target))
        if not path.exists():
            raise UserError(f"{target!r} is neither an operator ({', '.join(catalogue.names())}) nor a file or folder")
        if lock:
            raise UserError("the lock holds our own kernels; it says nothing about a foreign file")
        if arch_given:
            raise UserError("--arch is what our kernels are compiled for; a foreign file has its own")
        with _progress() as progress:
            return run.audit_path(path, limits.of_allowed(allow), progress)
    if allow:
        raise UserError("--allow is for foreign files; what our kernels may do is said by their contracts alone")
    if target is not None and (others := listing.lenders(target)):
        output.console().print(
            f"{target} also launches kernels of {', '.join(others)}; they are audited under those names"
        )
    with _progress() as progress:
        return run.audit_operators(None if target is None else (target,), arches, progress)


def _write_lock(everything: bool, op: str | None) -> tuple[Result, bool]:
    """(what was compiled, whether all of it is recorded). The kernels in the folder of ``op``; None: all."""
    from samebits.audit import compile as compiling
    from samebits.audit import listing, lock, run, show
    from samebits.cli import output

    path = _lock_path()
    listed = listing.jobs_of(None if op is None else (op,))
    work = listing.work(listed, compiling.ARCHES)
    if op is not None:
        lock.of_others(path, op)  # what cannot be written says so before minutes of work
    kept = {} if everything else lock.unchanged(path, work)
    todo = [(job, arch) for job, arch in work if job.key(arch) not in kept]
    with _progress() as progress:
        result = run.audit_work(todo, [one for one in listed if isinstance(one, listing.Unlisted)], progress)
    console = output.console()
    if result.reports:
        show.show(result, console)
    others = {} if op is None else lock.of_others(path, op)
    refused = lock.write(path, result, kept | others)
    console.print(
        f"lock: {len(todo) - len(refused)} entries written, {len(kept) + len(others)} kept because nothing changed for them"
    )
    if refused:
        console.print(f"[red]lock: {len(refused)} not recorded, because only clean code is[/red]")
    return result, not refused


def _lock_path() -> Path:
    from samebits import environment

    root = environment.checkout()
    if root is None:
        raise UserError(f"the lock is {LOCK} of a checkout, and this is an installed package")
    return root / LOCK


def _write_json(path: Path, result: Result, comparison: Comparison | None) -> None:
    content = result.to_json() | {"lock": comparison.to_json() if comparison is not None else None}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from error


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr, only where a person watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
