"""Benchmark lines as tables: where they were measured, targets, every row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from samebits.bench import results, show, targets
from samebits.report.parts import Cell, Table, good

STAMP = ("gpu", "driver", "torch", "triton", "nvrtc", "commit")


def measured_on(lines: Sequence[dict[str, Any]]) -> tuple[Table, ...]:
    """One row per machine, software and commit: a time is of those, not of the machine that writes the page."""
    counts: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if "skipped" not in line:
            counts.setdefault(tuple(str(line[key]) for key in STAMP), []).append(line)
    rows = tuple(
        (
            *(Cell(value) for value in stamp),
            Cell(", ".join(dict.fromkeys(line["op"] for line in mine))),
            Cell(str(len(mine))),
        )
        for stamp, mine in counts.items()
    )
    columns = (*STAMP, "operators", "rows")
    prose = frozenset({5, 6})
    return (Table("Where it was measured", columns, rows, numeric=frozenset({7}), prose=prose),) if rows else ()


def judged(lines: Sequence[dict[str, Any]]) -> tuple[Table, ...]:
    verdicts, unheard = targets.judge(lines)
    if not verdicts and not unheard:
        return ()
    words: dict[bool | None, Cell] = {
        True: Cell("met", "good"),
        False: Cell("missed", "bad"),
        None: Cell("not measured", "none"),
    }
    rows = tuple(
        (
            Cell(f"{v.row['op']} {v.row['direction']}"),
            Cell(f"{v.row['shape']['T']:,}"),
            Cell(v.row["contract"]),
            _gradients(v.row),
            Cell(v.target.text),
            Cell("-" if v.value is None else f"{v.value:.3g}"),
            words[v.met],
            Cell(f"{v.row['us']:,.2f}"),
            Cell(f"{v.floor_us:,.2f}"),
            Cell(f"{v.over_floor:.2f}x"),
        )
        for v in verdicts
    )
    columns = ("case", "T", "contract", "gradients", "target", "reached", "verdict", "us", "floor us", "over floor")
    note = "floor: bytes of each tensor once, over the copy bandwidth measured in the same run, plus an empty kernel"
    missing = tuple(f"no measured row: {text}" for text in unheard)
    return (Table("Targets", columns, rows, missing, frozenset({1, 5, 7, 8, 9}), caption=note),)


def times(lines: Sequence[dict[str, Any]]) -> Iterable[Table]:
    for op in dict.fromkeys(line["op"] for line in lines):
        yield _operator(op, [line for line in lines if line["op"] == op])


def _gradients(line: dict[str, Any]) -> Cell:
    """The dtype of the gradients in flight; a forward alone has none."""
    if line["direction"] == "fwd":
        return Cell("-")
    return Cell("FP32" if results.has_fp32_gradients(line) else "model")


def _operator(op: str, lines: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for line in lines for name in line.get("peers", {})))
    rows = tuple(
        (*_row(line), *(_peer(line["peers"].get(name)) for name in names)) for line in lines if "skipped" not in line
    )
    ours = ("dir", "T", "shape", "contract", "backend", "gradients", "us", "of copy", "host us", "extra MB", "bits")
    peers = frozenset(range(len(ours), len(ours) + len(names)))
    note = "peers: us, and how many times ours that is"
    title = f"{op}: every measured row"
    numeric = frozenset({1, 6, 7, 8, 9}) | peers
    notes = tuple(show.notes(lines))
    return Table(title, (*ours, *names), rows, notes, numeric, prose=peers, caption=note, folded=True)


def _row(line: dict[str, Any]) -> tuple[Cell, ...]:
    spread = f"{line['us_min']:.2f} to {line['us_max']:.2f}, {line.get('plan', '')}"
    bits = "verified" if line["bits_checked"] else "NOT verified"
    return (
        Cell(line["direction"]),
        Cell(f"{line['shape']['T']:,}"),
        Cell(show.shape_text(line)),
        Cell(line["contract"]),
        Cell(line["backend"]),
        _gradients(line),
        Cell(f"{line['us']:,.2f}", "open", spread),
        Cell(f"{line['copy_fraction']:.3f}"),
        Cell(f"{line.get('host_us', 0):.1f}"),
        Cell(f"{line['extra_bytes'] / 1e6:.2f}"),
        Cell(bits, good(line["bits_checked"]), line.get("bits", "")),
    )


def _peer(peer: dict[str, Any] | None) -> Cell:
    return Cell(f"{peer['us']:,.1f} ({peer['ratio']:.2f}x)") if peer else Cell("")
