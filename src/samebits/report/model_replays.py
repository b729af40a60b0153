"""A qualification of a whole model, or of a generation by it, as tables: where it leaves the class, what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.report import generations
from samebits.report.block_replays import bits, number
from samebits.report.pages import TablesPage
from samebits.report.parts import Cell, Group, State, Table, Tile, good
from samebits.report.replays import claims


def page(replay: dict[str, Any]) -> TablesPage:
    """The page of one qualification, from its JSON."""
    lead = f"{replay['geometry']}; weights: {replay['weights']}; beside {replay['peer']}, on {replay['device']}"
    return TablesPage(
        title=f"Replay of {replay['model']}, {replay['stage']}",
        lead=lead,
        environment=replay["environment"],
        command=replay.get("command", ""),
        tiles=tuple(tiles(replay["checks"], replay["cases"])),
        tables=tuple(summary(replay)),
        groups=tuple(Group(case["title"], _caption(case), tuple(case_tables(case))) for case in replay["cases"]),
    )


def summary(replay: dict[str, Any]) -> list[Table]:
    return [claims(replay["checks"]), contracts(replay["contracts"])]


def tables(replay: dict[str, Any]) -> list[Table]:
    """For a terminal: what is long is left to the page, and the claims come last."""
    made = [table for case in replay["cases"] for table in case_tables(case) if not table.folded]
    return [*made, claims(replay["checks"])]


def contracts(used: dict[str, str]) -> Table:
    rows = tuple((Cell(operator), Cell(name)) for operator, name in sorted(used.items()))
    return Table("Contracts", ("operator", "contract"), rows, folded=True)


def tiles(checks: Sequence[dict[str, Any]], cases: Sequence[dict[str, Any]]) -> list[Tile]:
    asked = [check for check in checks if check["judged"]]
    broken = sum(not check["passed"] for check in asked)
    first = next((case["first_drift"] for case in cases if case["first_drift"]), None)
    held: State = good(not broken)
    return [
        Tile("Claims", f"{len(asked) - broken} of {len(asked)} hold", f"cases: {len(cases)}", held, "tables"),
        Tile(
            "First drift",
            first or "none",
            "first place whose bits are not the class's",
            "none" if first else good(True),
            "tables",
        ),
    ]


def case_tables(case: dict[str, Any]) -> list[Table]:
    if "record" in case:
        return generations.case_tables(case)
    made = [_boundaries(case), costs(case)]
    return [*made, *_gradients(case)] if case["gradients"] else made


def _caption(case: dict[str, Any]) -> str:
    if "record" in case:
        return generations.caption(case)
    firsts = (
        ("first boundary that leaves the class", case["first_drift"]),
        ("first part that does on the class's inputs", case["first_isolated_drift"]),
    )
    words = "; ".join(f"{what}: {name or 'none'}" for what, name in firsts)
    return f"{case['batch']} sequences, seed {case['seed']}; {words}"


def _boundaries(case: dict[str, Any]) -> Table:
    rows = []
    for at in case["boundaries"]:
        isolated = at["isolated"]
        rows.append(
            (
                Cell(at["name"]),
                yes(at["repeat"]),
                varying(at["rows"], True),
                varying(at["peer_rows"], False),
                bits(at["chained"]),
                Cell("-") if isolated is None else bits(isolated),
                Cell(number(at["apart"])),
                Cell(number(at["rms"])),
                Cell(number(at["peer_rms"])),
                Cell(at["digest"][:12], detail=at["digest"]),
            )
        )
    columns = (
        "boundary", "repeats", "rows that vary", "class's rows that vary", "chained, differing", "isolated, differing",
        "from the class / max", "from FP64, rms", "class's", "digest",
    )  # fmt: skip
    note = (
        "chained: the whole patched model; isolated: one part, patched, given what the class's part was given. Rows vary where a "
        "sequence alone, or at another place in the batch, has other bits."
    )
    numeric = frozenset({2, 3, 4, 5, 6, 7, 8})
    return Table(f"Boundaries, {case['title']}", columns, tuple(rows), numeric=numeric, caption=note)


def costs(case: dict[str, Any]) -> Table:
    rows = tuple(
        (Cell(what), Cell(f"{cost['seconds'] * 1e3:,.1f}"), Cell(_mib(cost["extra_bytes"])))
        for what, cost in case["costs"].items()
    )
    columns = ("what", "ms", "extra memory, MiB")
    note = "by the clock of the host, the shortest of a few calls; not a benchmark"
    return Table(f"Time and memory, {case['title']}", columns, rows, numeric=frozenset({1, 2}), caption=note)


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


def _gradients(case: dict[str, Any]) -> list[Table]:
    leaves, reached = [], []
    for leaf in case["gradients"]["leaves"]:
        leaves.append(
            (
                Cell(leaf["name"]),
                Cell(leaf["dtype"]),
                yes(leaf["repeat"]),
                says(leaf["peer_repeat"]),
                bits(leaf["chained"]),
                Cell(number(leaf["error"]["relative"])),
                Cell(number(leaf["peer_error"]["relative"])),
                Cell(leaf["digest"][:12], detail=leaf["digest"]),
            )
        )
    for at in case["gradients"]["reached"]:
        reached.append(
            (
                Cell(at["name"]),
                yes(at["repeat"]),
                says(at["peer_repeat"]),
                varying(at["rows"], True),
                varying(at["peer_rows"], False),
                bits(at["chained"]),
                Cell(at["digest"][:12], detail=at["digest"]),
            )
        )
    columns = ("leaf", "dtype", "repeats", "class repeats", "differing", "from FP64 / max", "class's", "digest")
    along = ("where", "repeats", "class repeats", "rows that vary", "class's rows that vary", "differing", "digest")
    return [
        Table(f"Gradients that arrive, {case['title']}", along, tuple(reached), numeric=frozenset({3, 4, 5})),
        Table(f"Gradients, {case['title']}", columns, tuple(leaves), numeric=frozenset({4, 5, 6}), folded=True),
    ]


def yes(held: bool) -> Cell:
    return Cell("yes" if held else "no", good(held))


def says(held: bool) -> Cell:
    """What is shown and not judged."""
    return Cell("yes" if held else "no", "open" if held else "none")


def varying(rows: dict[str, Any], judged: bool) -> Cell:
    state: State = good(not rows["varying"]) if judged else "none" if rows["varying"] else "open"
    detail = f"first: row {rows['first']}" if rows["varying"] else ""
    return Cell(f"{rows['varying']:,} of {rows['checked']:,}", state, detail)
