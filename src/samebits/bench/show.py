"""Result lines as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from samebits.bench import results
from samebits.bench.targets import Verdict
from samebits.cli.output import table

_RIGHT = ("us", "spread", "of copy", "GB/s", "TFLOP/s", "host us", "extra MB", "T")


def shape_text(line: dict[str, Any]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in line["shape"].items() if axis != "T")


def measured(lines: Sequence[dict[str, Any]]) -> Table:
    """One row per line; each peer is shown as its time and how many times ours it takes."""
    names = list(
        dict.fromkeys(name for line in lines for name in (*line.get("peers", {}), *line.get("peers_skipped", {})))
    )
    rated = any(line.get("tflops") for line in lines)
    ours = ("us", "spread", "GB/s", "of copy", *(("TFLOP/s",) if rated else ()), "host us", "extra MB", "bits")
    made = table("Benchmark", "dir", "T", "shape", "contract", "backend", *ours, *names, right=(*_RIGHT, *names))
    for line in lines:
        where = (
            line["direction"],
            str(line["shape"]["T"]),
            shape_text(line) + (", FP32 grads" if results.has_fp32_gradients(line) else ""),
        )
        if "skipped" in line:
            made.add_row(
                *where,
                line.get("contract", "all"),
                line.get("backend", "all"),
                f"[yellow]skipped: {line['skipped']}[/yellow]",
            )
            continue
        cells = []
        for name in names:
            peer = line["peers"].get(name)
            cells.append(
                f"{peer['us']:.1f} ({peer['ratio']:.2f}x)"
                if peer
                else ("left out" if name in line["peers_skipped"] else "")
            )
        made.add_row(
            *where,
            line["contract"],
            line["backend"],
            f"{line['us']:.2f}",
            f"{line['us_min']:.2f}..{line['us_max']:.2f}",
            f"{line['gbps']:.0f}",
            f"{line['copy_fraction']:.3f}",
            *((f"{line['tflops']:.0f}" if line["tflops"] else "",) if rated else ()),
            f"{line['host_us']:.1f}",
            f"{line['extra_bytes'] / 1e6:.2f}",
            "[green]checked[/green]" if line["bits_checked"] else "[red]NOT[/red]",
            *cells,
        )
    return made


def notes(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Everything that a table cell is too small for: bits that differ, peers and sizes that were left out."""
    found: dict[str, None] = {}
    for line in lines:
        where = f"{line['op']} {line['direction']} T={line['shape']['T']}, {shape_text(line)}"
        if "skipped" in line:
            who = "/".join(line[key] for key in ("contract", "backend") if key in line)
            found[f"skipped {where}{f', {who}' if who else ''}: {line['skipped']}"] = None
            continue
        if not line["bits_checked"]:
            found[f"bits of {where}, {line['contract']}/{line['backend']}: {line['bits']}"] = None
        for name, reason in line["peers_skipped"].items():
            found[f"peer {name!r} at {where}: {reason}"] = None
        for name, peer in line["peers"].items():
            moved = [what for what, kept in peer.get("invariant", {}).items() if not kept]
            if moved:
                found[f"peer {name!r} at {where}: its rows have other bits with: {', '.join(moved)}"] = None
        for name, same in line.get("same_bits_as", {}).items():
            found[f"{where}, {line['contract']}: {'the' if same else 'NOT the'} bits of {name}"] = None
    return list(found)


def judged(verdicts: Sequence[Verdict], unheard: Sequence[str]) -> Table:
    """Targets met or missed, each with its distance from the floor."""
    made = table(
        "Targets", "op", "dir", "T", "contract", "grads", "target", "reached", "verdict", "us", "floor us", "over floor",
        right=("T", "reached", "us", "floor us", "over floor"),
    )  # fmt: skip
    for verdict in verdicts:
        line = verdict.row
        word = {True: "[green]met[/green]", False: "[red]missed[/red]", None: "[yellow]not measured[/yellow]"}[
            verdict.met
        ]
        made.add_row(
            line["op"],
            line["direction"],
            str(line["shape"]["T"]),
            line["contract"],
            "FP32" if results.has_fp32_gradients(line) else "model",
            verdict.target.text,
            "-" if verdict.value is None else f"{verdict.value:.3g}",
            word,
            f"{line['us']:.2f}",
            f"{verdict.floor_us:.2f}",
            f"{verdict.over_floor:.2f}x",
        )
    for text in unheard:
        made.add_row(text, *[""] * 6, "[yellow]no such row[/yellow]")
    return made
