"""``samebits env``."""

from __future__ import annotations

from typing import Annotated

import typer


def env(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """GPU, driver, torch, triton, nvrtc, commit: what every recorded result is stamped with."""
    from samebits import environment
    from samebits.cli import output

    found = environment.collect().to_json()
    if as_json:
        output.print_json(found)
        return
    table = output.table("Environment", "what", "value")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), value if value != environment.ABSENT else f"[dim]{value}[/dim]")
    output.console().print(table)
