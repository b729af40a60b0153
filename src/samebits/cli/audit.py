"""``samebits audit``: judge machine code by the rules of the contracts, without a GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    write_lock: Annotated[bool, typer.Option("--write-lock", help="Rewrite the recorded opcode counts.")] = False,
    check_lock: Annotated[bool, typer.Option("--check-lock", help="Compare with the recorded opcode counts.")] = False,
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

    _refuse_nonsense(write_lock, check_lock, target, arch)
    arches = tuple(arch) if arch else compiling.ARCHES
    try:
        numbers = sorted({compiling.capability(name) for name in arches})
        result, ops = _run(target, [f"sm_{n}" for n in numbers], bool(arch), allow or [], write_lock or check_lock)
        show.show(result, output.console())
        comparison = _lock(result, ops, arches, write_lock, check_lock)
    except ValueError as error:
        raise UserError(str(error)) from error
    if comparison is not None:
        show.show_comparison(comparison, output.console())
    if json is not None:
        _write_json(json, result, comparison)
    if not result.clean or (comparison is not None and comparison.status != "same"):
        raise typer.Exit(1)


def _refuse_nonsense(write_lock: bool, check_lock: bool, target: str | None, arch: list[str] | None) -> None:
    if write_lock and check_lock:
        raise UserError("--write-lock and --check-lock exclude each other")
    if write_lock and (target is not None or arch):
        raise UserError("--write-lock records all operators for all architectures: no target, no --arch")


def _run(
    target: str | None, arches: list[str], arch_given: bool, allow: list[str], lock: bool
) -> tuple[Result, tuple[str, ...] | None]:
    from samebits import registry
    from samebits.audit import limits, run

    ours = target is None or target in registry.names()
    if not ours:
        path = Path(str(target))
        if not path.exists():
            raise UserError(f"{target!r} is neither an operator ({', '.join(registry.names())}) nor a file or folder")
        if lock:
            raise UserError("the lock holds our own kernels; it says nothing about a foreign file")
        if arch_given:
            raise UserError("--arch is what our kernels are compiled for; a foreign file has its own")
        with _progress() as progress:
            return run.audit_path(path, limits.of_allowed(allow), progress), None
    if allow:
        raise UserError("--allow is for foreign files; what our kernels may do is said by their contracts alone")
    ops = None if target is None else (target,)
    with _progress() as progress:
        return run.audit_operators(ops, arches, progress), ops


def _lock(
    result: Result, ops: tuple[str, ...] | None, arches: tuple[str, ...], write_lock: bool, check_lock: bool
) -> Comparison | None:
    from samebits import environment
    from samebits.audit import lock

    if not (write_lock or check_lock):
        return None
    root = environment.checkout()
    if root is None:
        raise UserError(f"the lock is {LOCK} of a checkout, and this is an installed package")
    if write_lock:
        lock.write(root / LOCK, result)
        return None
    return lock.compare(root / LOCK, result, ops, arches)


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
