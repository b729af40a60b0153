"""The ``samebits`` command. Only the module of the command that was asked for is imported, so ``samebits list`` is fast.

A command is one function in ``samebits/cli/<module>.py`` with typer annotations; adding one is a line in ``COMMANDS``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from samebits.cli.errors import UserError

TRACEBACK_VARIABLE = "SAMEBITS_TRACEBACK"
"""Set it to see the whole traceback behind a one-line error."""


@dataclass(frozen=True)
class Command:
    name: str
    module: str
    function: str
    help: str
    """Shown by ``samebits --help``, where the module is not imported; the function's own docstring is the full text."""


COMMANDS = (
    Command("check", "samebits.cli.check", "check", "Run the four checks on an operator or on any callable of yours."),
    Command("accept", "samebits.cli.accept", "accept", "Hold a provider of a model's operators to the oracle, byte by byte."),
    Command("replay", "samebits.cli.replay", "replay", "Replay a model's chain of operators beside the model's own code."),
    Command("figures", "samebits.cli.figures", "figures", "Draw a recorded replay for print: figures and their captions."),
    Command("prepare", "samebits.cli.prepare", "prepare", "Fetch and verify the tensors of a checkpoint that a replay needs."),
    Command("explain", "samebits.cli.explain", "explain", "Which backend and plan a call would take, and its orders."),
    Command("list", "samebits.cli.listing", "list_operators", "Operators, contracts, backends, and where each was proven."),
    Command("env", "samebits.cli.env", "env", "GPU, driver, torch, triton, nvrtc, commit."),
    Command("audit", "samebits.cli.audit", "audit", "Judge compiled kernels, ours or foreign, by the rules of a contract."),
    Command("bench", "samebits.cli.bench", "bench", "Time an operator beside its peers, with its bits verified in the same run."),
    Command("compare", "samebits.cli.compare", "compare", "Every peer of an operator: bits, invariance, error, time, memory."),
    Command("trace", "samebits.cli.trace", "trace", "Record what a model computes, as digests in execution order."),
    Command("drift", "samebits.cli.drift", "drift", "Name the first operation that differs between two traces."),
    Command("invariance", "samebits.cli.invariance", "invariance", "Name the first module whose rows depend on the batch."),
    Command("demo", "samebits.cli.demo", "demo", "The main job on a CPU: checks, audit, a real decoder layer, the report."),
    Command("report", "samebits.cli.report", "report", "Write one self-contained HTML page from recorded results."),
)  # fmt: skip


def main() -> None:
    """Console entry point."""
    app = build(sys.argv[1:])
    app()


def build(arguments: Sequence[str]) -> typer.Typer:
    """The app for one command line: the command that it names is loaded, every other one is only listed."""
    app = typer.Typer(
        help="The same bits in training and inference: check, audit and time batch-invariant operators.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_version_option)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for command in COMMANDS:
        if importlib.util.find_spec(command.module) is None:
            continue
        if command.name == wanted:
            _register(app, command)
        else:
            app.command(command.name, help=command.help)(_unloaded)
    return app


def _register(app: typer.Typer, command: Command) -> None:
    try:
        function = getattr(importlib.import_module(command.module), command.function)
    except ModuleNotFoundError as error:
        refusal = f"`samebits {command.name}` needs the module {error.name!r}, which is not installed"
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}

        def refuse() -> None:
            raise UserError(refusal)

        app.command(command.name, help=command.help, context_settings=anything)(_readable(refuse))
    else:
        app.command(command.name)(_readable(function))


def _print_version(asked: bool) -> None:
    if asked:
        from samebits import __version__

        typer.echo(__version__)
        raise typer.Exit


def _version_option(
    version: bool = typer.Option(
        False, "--version", help="Print the version and leave.", is_eager=True, callback=_print_version
    ),
) -> None:
    pass


def _unloaded() -> None:
    raise AssertionError("a command that was not named cannot run")


def _readable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mistake of the user ends in one clear line and exit code 2, never in a traceback."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            package = (error.name or "").split(".")[0]
            extra = {
                "cuda": "cuda",
                "triton": "triton",
                "matplotlib": "report",
                "transformers": "models",
                "diffusers": "models",
                "safetensors": "models",
            }.get(package)
            cure = f": pip install 'samebits[{extra}]'" if extra else ""
            typer.echo(f"error: this needs the module {error.name!r}, which is not installed{cure}", err=True)
            raise typer.Exit(2) from None
        except (UserError, ValueError, OSError) as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            typer.echo(f"error: {' '.join(_said(error).split())}", err=True)
            raise typer.Exit(2) from None

    return guarded


def _said(error: Exception) -> str:
    """An error of the system by file and reason, without its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
