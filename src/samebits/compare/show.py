"""A report as a table, and in words what its cells are too small for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from samebits.bench.case import DIRECTIONS
from samebits.cli.output import table

VERDICTS = ("fwd bits", "bwd bits", "alone", "parts", "sizes", "repeats")
"""Results and gradients the same as ours; the three checks of batch invariance; repeated runs the same."""
_WORDS = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "[dim]-[/dim]"}


def verdicts(entry: dict[str, Any]) -> dict[str, bool | None]:
    """One per column of the matrix; None where there is none: not run, or nothing to compare."""
    found: dict[str, bool | None] = dict.fromkeys(VERDICTS)
    if entry["equality"] is not None:
        found |= {
            "fwd bits": entry["equality"]["same_results"],
            "bwd bits": entry["equality"]["same_gradients"],
        }
    seen = entry["invariance"]
    if seen is not None:
        found |= {
            "alone": seen["all_rows"]["passed"],
            "parts": seen["full_vs_sub_batches"]["passed"],
            "sizes": seen["batch_size_sweep"]["passed"],
            "repeats": seen["repeatable"],
        }
    return found


def ran(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a table: what ran, and what should have."""
    return [entry for entry in report["contestants"] if entry["status"] in ("compared", "failed")]


def worst(entry: dict[str, Any], gradients: bool) -> float | None:
    """The largest relative error of the results or gradients."""
    kept = [float(e["relative"]) for n, e in (entry["accuracy"] or {}).items() if n.startswith("grad_") == gradients]
    return max(kept, default=None)


def largest(report: dict[str, Any]) -> int:
    """The largest batch in which ours was timed in every direction; the first one where there is none."""
    rows: Sequence[int] = report["scale"]["timed"]
    mine = report["contestants"][0]["latency"]
    whole = [count for count in rows if all("us" in entry for entry in mine if entry["rows"] == count)]
    return max(whole, default=rows[0])


def timed(entry: dict[str, Any], direction: str, rows: int) -> dict[str, Any] | None:
    return next((t for t in entry["latency"] if (t["direction"], t["rows"]) == (direction, rows)), None)


def table_of(report: dict[str, Any]) -> Table:
    rows = largest(report)
    times = [f"{direction} us" for direction in DIRECTIONS]
    errors = ("fwd error", "bwd error")
    sizes = ", ".join(f"{axis}={size}" for axis, size in report["sizes"].items())
    title = f"{report['op']}, {report['contract']} on {report['backend']}, {report['device']}, {sizes}; times of {rows} rows"
    made = table(title, "", "status", *VERDICTS, *errors, *times, "extra MB", right=(*errors, *times, "extra MB"))
    for entry in ran(report):
        cells = [_WORDS[verdict] for verdict in verdicts(entry).values()]
        for gradients in (False, True):
            error = worst(entry, gradients)
            cells.append("" if error is None else f"{error:.1e}")
        cells += [_time(timed(entry, direction, rows)) for direction in DIRECTIONS]
        made.add_row(escape(entry["name"]), _status(entry), *cells, _memory(entry, rows))
    return made


def _status(entry: dict[str, Any]) -> str:
    colour = {"compared": "green", "failed": "red"}.get(entry["status"], "yellow")
    return f"[{colour}]{entry['status']}[/{colour}]"


def _time(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "failed" in found:
        return "failed"
    us = f"{found['us']:.1f}" if found["us"] < 1000 else f"{found['us']:,.0f}"
    return f"{us} {found['ratio']:.2f}x" if "ratio" in found else us


def _memory(entry: dict[str, Any], rows: int) -> str:
    """Of forward and backward together, or of the forward where that is all."""
    found = timed(entry, "fwd+bwd", rows) or timed(entry, "fwd", rows) or {}
    extra = found.get("extra_bytes")
    return "" if extra is None else f"{extra / 1e6:.1f}"


def notes(report: dict[str, Any]) -> list[str]:
    """Why something was not compared, and the first of everything that differs."""
    told = []
    preset = report["contestants"][0]["process"]["environment"]
    if preset:
        listed = ", ".join(f"{name}={value}" for name, value in preset.items())
        told.append(f"the environment has {listed}: peers without a mode do not run in their libraries' defaults")
    for entry in report["contestants"]:
        name = entry["name"]
        if entry["reason"] is not None:
            told.append(f"{name}: {entry['status']}: {entry['reason']}")
        for text in (entry["equality"] or {}).get("miscounted", []):
            told.append(f"{name}: {text}")
        for tensor, seen in (entry["equality"] or {}).get("tensors", {}).items():
            if not seen["same"]:
                share = f"{seen['differing']} of {seen['elements']} elements"
                told.append(f"{name}: {tensor} has other bits than ours in {share}; {seen['first']}")
        if entry["invariance"] is not None and entry["invariance"]["first_failure"] is not None:
            told.append(f"{name}: {entry['invariance']['first_failure']}")
        for found in entry["latency"]:
            if "failed" in found:
                told.append(f"{name}: {found['direction']} of {found['rows']} rows not timed: {found['failed']}")
    return told
