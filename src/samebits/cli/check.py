"""``samebits check``: the four checks on an operator or on any callable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def check(
    op: Annotated[
        str, typer.Argument(metavar="OP", help="An operator, torch.mm, module:callable or path/file.py:function.")
    ],
    backend: Annotated[str | None, typer.Option(help="Backend of the operator: cuda, triton or reference.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Of the floating inputs: {', '.join(_DTYPES)}.")] = None,
    contract: Annotated[
        str | None,
        typer.Option(help="Contract of the operator, or 'all'. With --against: the bits the callable claims."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="With an operator: the callable to judge in its place. With a callable: its judge."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows T of the canonical batch (default 40 on a CPU, 300 on a GPU).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the integer generator.")] = 0,
    size: Annotated[list[str] | None, typer.Option(help="Size of an axis, e.g. D=4096. Repeatable.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Shape of an argument, in order, e.g. T,64 (T marks the rows). Repeatable.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Look along one axis only, e.g. batch. Repeatable.")] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the gradient checks out.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Check accuracy and batch invariance, forward and backward. Exit code 0: all passed, 1: something did not, 2: wrong use."""
    import torch

    from samebits import catalogue, verify
    from samebits.verify.report import show

    try:
        if dtype is not None and dtype not in _DTYPES:
            raise verify.UsageError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
        contracts: list[str | None] = [contract]
        if contract == "all":
            if op not in catalogue.names():
                raise verify.UsageError(
                    f"--contract all needs an operator; {op!r} is none of {', '.join(catalogue.names())}"
                )
            contracts = [c.name for c in catalogue.declared(op).contracts]
        reports = []
        for name in contracts:
            report = verify.check(
                op,
                against=against,
                contract=name,
                backend=backend,
                device=device,
                dtype=getattr(torch, dtype) if dtype is not None else None,
                rows=rows,
                seed=seed,
                sizes=_sizes(size or []),
                shapes=shape or [],
                only=only or [],
                forward_only=forward_only,
            )
            show(report)
            reports.append(report)
    except verify.UsageError as error:
        typer.echo(f"samebits check: {error}", err=True)
        raise typer.Exit(2) from error
    if json_file is not None:
        found = [report.to_json() for report in reports]
        json_file.write_text(json.dumps(found[0] if len(found) == 1 else found, indent=2, sort_keys=True) + "\n")
    raise typer.Exit(max(report.exit_code for report in reports))


def _sizes(texts: list[str]) -> dict[str, int]:
    from samebits.verify import UsageError

    sizes = {}
    for text in texts:
        axis, equals, value = text.partition("=")
        if not (equals and value.isdecimal()):
            raise UsageError(f"--size {text}: write AXIS=NUMBER, e.g. D=4096")
        sizes[axis] = int(value)
    return sizes
