"""A replay of a model's conditioning chain as tables: which stage differs first, what each is off by, what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.report.block_replays import bits, control_table, gradient_tables, number, peer_variations
from samebits.report.figures import LATENCY_NOTE, latency_figure, node_figure
from samebits.report.pages import TablesPage
from samebits.report.parts import Cell, Group, State, Table, Tile, good

_STAGE_COLUMNS = (
    "stage", "repeats", "rows that vary", "peer's rows that vary", "chained, differing", "isolated, differing", "max ulp",
    "promised", "error / max", "peer's", "correctly rounded", "peer's",
)  # fmt: skip
_TIMES = ("us", "peer's")
_MODES = ("separate", "fused", "peer")


def page(replay: dict[str, Any]) -> TablesPage:
    """The page of one replay, from its JSON."""
    lead = f"{replay['geometry']}; weights: {replay['weights']}; beside {replay['peer']}, on {replay['device']}"
    return TablesPage(
        title=f"Replay of {replay['model']}, {replay['stage']}",
        lead=lead,
        environment=replay["environment"],
        command=replay.get("command", ""),
        tiles=tuple(_tiles(replay)),
        tables=tuple(summary(replay)),
        groups=tuple(group(case) for case in replay["cases"]),
    )


def summary(replay: dict[str, Any]) -> list[Table]:
    """What must hold, where the chain first differs in each case, and what ran each stage."""
    return [claims(replay["checks"]), _overview(replay["cases"]), *_varying(replay["cases"]), _owners(replay)]


def group(case: dict[str, Any]) -> Group:
    first = case["first_isolated_drift"] or "none"
    caption = f"{case['layout']} layout, seed {case['seed']}; first stage that differs on the peer's inputs: {first}"
    figures = (node_figure(case), *((latency_figure(case),) if _timed(case) else ()))
    return Group(case["title"], caption, tuple(case_tables(case)), figures)


def case_tables(case: dict[str, Any]) -> list[Table]:
    rows = tuple(_stage(entry) for entry in case["stages"])
    note = (
        "chained: fed by its own stages before; isolated: fed by the peer's, so that a difference is the stage's own. "
        "Errors are the largest distance from the FP64 golden over the golden's largest magnitude."
    )
    columns: tuple[str, ...] = _STAGE_COLUMNS
    if _timed(case):
        rows = tuple((*row, *_times(entry)) for row, entry in zip(rows, case["stages"], strict=True))
        columns += _TIMES
        note += f" us: isolated, forward; {LATENCY_NOTE}"
    numeric = frozenset({2, 3, 4, 5, 6, *range(8, len(columns))})
    made = [Table(f"Stages, {case['title']}", columns, rows, numeric=numeric, caption=note)]
    if _of_nodes(case):
        made += gradient_tables(case)
    elif case["gradients"]:
        made.append(_gradients(case))
    if case["controls"]:
        made.append(control_table(case))
    return made


def _of_nodes(case: dict[str, Any]) -> bool:
    """Whether its gradients are those of a block, by leaf and by node."""
    return bool(case["gradients"]) and "nodes" in case["gradients"]


def _timed(case: dict[str, Any]) -> bool:
    """Whether its stages were timed: older records have no times."""
    return any(entry.get("latency_us") for entry in case["stages"])


def _times(entry: dict[str, Any]) -> tuple[Cell, Cell]:
    found = entry["latency_us"]
    ours, peers = (Cell("-" if found[who] is None else f"{found[who]:,.1f}") for who in ("ours", "peer"))
    return Cell(ours.text, detail=f"{found['how']}, median of {found['calls']}"), peers


def _stage(entry: dict[str, Any]) -> tuple[Cell, ...]:
    judged = not entry["stand_in"]
    chained, isolated = entry["chained"], entry["isolated"]
    name = Cell(f"{entry['name']} (stand-in)", "none", entry["owner"]) if entry["stand_in"] else Cell(entry["name"])
    off = Cell(number(entry["error"]["relative"]))
    if judged:
        off = Cell(off.text, "bad") if not entry["within_tolerance"] else off
    broken = judged and entry["promised"] and not isolated["same"]
    return (
        name,
        _repeats(entry["repeat"], judged),
        _rows(entry["rows"], judged),
        _rows(entry["peer_rows"], False),
        bits(chained),
        Cell(bits(isolated).text, "bad" if broken else bits(isolated).state, isolated["first"]),
        Cell("" if isolated["max_ulp"] is None else f"{isolated['max_ulp']:,}"),
        Cell("yes" if entry["promised"] else "no"),
        off,
        Cell(number(entry["peer_error"]["relative"])),
        Cell(f"{entry['error']['correctly_rounded']:.2%}"),
        Cell(f"{entry['peer_error']['correctly_rounded']:.2%}"),
    )


def _repeats(repeats: bool, judged: bool) -> Cell:
    return Cell("yes" if repeats else "no", good(repeats) if judged else "open" if repeats else "none")


def _rows(rows: dict[str, Any], judged: bool) -> Cell:
    state: State = good(not rows["varying"]) if judged else "none" if rows["varying"] else "open"
    detail = f"first: row {rows['first']}" if rows["varying"] else ""
    text = f"{rows['varying']:,} of {rows['checked']:,}"
    if rows.get("alone_varying"):
        text += f"; {rows['alone_varying']:,} of {rows['alone']:,} alone"
    return Cell(text, state, detail)


def _gradients(case: dict[str, Any]) -> Table:
    found = case["gradients"]
    rows = []
    for leaf in found["leaves"]:
        cells = [Cell(_short(leaf["name"])), Cell(leaf["dtype"]), Cell(f"{leaf['golden_absmax']:.3g}")]
        for mode in _MODES:
            entry = leaf["modes"][mode]
            judged = mode != "peer" and mode not in found["stand_ins"]
            cells += [
                _repeats(entry["repeat"], judged),
                Cell(number(entry["relative"])),
                Cell(f"{entry['correctly_rounded']:.2%}"),
            ]
        rows.append(tuple(cells))
    titles = [f"{mode}{' (stand-in)' if mode in found['stand_ins'] else ''}" for mode in _MODES]
    columns = ["parameter", "dtype", "golden max"]
    for title in titles:
        columns += [f"{title}: repeats", "error / max", "correctly rounded"]
    note = "gradients of the parameters up to the gather; fused: projection and gather as one node, its table gradient FP32"
    numeric = frozenset({2, 4, 5, 7, 8, 10, 11})
    return Table(f"Gradients, {case['title']}", tuple(columns), tuple(rows), numeric=numeric, caption=note)


def _short(name: str) -> str:
    """A parameter of block 0 by its name in the block."""
    return name.removeprefix("transformer_blocks.0.")


def claims(checks: Sequence[dict[str, Any]]) -> Table:
    """The one table of what must hold."""
    rows = tuple((Cell(c["name"]), _verdict(c), Cell(f"{c['judged']:,}"), Cell(c["detail"])) for c in checks)
    columns = ("claim", "verdict", "asked of", "where not")
    return Table("What must hold", columns, rows, prose=frozenset({0, 3}), numeric=frozenset({2}))


def _verdict(check: dict[str, Any]) -> Cell:
    if not check["judged"]:
        return Cell("not judged", "none")
    return Cell("holds" if check["passed"] else "broken", good(check["passed"]))


def _overview(cases: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for case in cases:
        stages = case["stages"]
        equal = sum(stage["isolated"]["same"] for stage in stages)
        promised = [stage for stage in stages if stage["promised"] and not stage["stand_in"]]
        kept = sum(stage["isolated"]["same"] for stage in promised)
        rows.append(
            (
                Cell(case["title"]),
                Cell(case["first_drift"] or "none", "open"),
                Cell(case["first_isolated_drift"] or "none", "open"),
                Cell(f"{equal} of {len(stages)}"),
                Cell(f"{kept} of {len(promised)}", good(kept == len(promised)) if promised else "open"),
            )
        )
    columns = ("case", "first stage that differs", "on the peer's inputs", "stages with the peer's bits", "promised")
    return Table("Where the chain leaves the peer", columns, tuple(rows), numeric=frozenset({3, 4}))


def _varying(cases: Sequence[dict[str, Any]]) -> list[Table]:
    """Where the peer is not even equal to itself. No table where it always is."""
    rows = []
    for case in cases:
        for stage in case["stages"]:
            if stage["peer_rows"]["varying"] or not stage["peer_repeat"]:
                cells = (Cell(case["title"]), Cell(stage["name"]), _repeats(stage["peer_repeat"], False))
                rows.append((*cells, _rows(stage["peer_rows"], False)))
        rows += [(Cell(case["title"]), Cell(what), _repeats(False, False), Cell("")) for what in _unrepeated(case)]
    if not rows:
        return []
    note = (
        "the peer beside itself: the same call twice, and up to 8 rows alone, all of them in halves and beside a second "
        "sequence, against the rows in the batch"
    )
    columns = ("case", "stage", "repeats", "rows that vary")
    return [Table("Where the peer varies with itself", columns, tuple(rows), numeric=frozenset({3}), caption=note)]


def _unrepeated(case: dict[str, Any]) -> Sequence[str]:
    """What of the peer's gradients does not repeat."""
    if _of_nodes(case):
        return peer_variations(case)
    leaves = case["gradients"]["leaves"] if case["gradients"] else ()
    return [f"gradient of {leaf['name']}" for leaf in leaves if not leaf["modes"]["peer"]["repeat"]]


def _owners(replay: dict[str, Any]) -> Table:
    stages = {stage["name"]: stage for case in replay["cases"][:1] for stage in case["stages"]}
    rows = []
    for name, owner in replay["candidate"].items():
        ran = stages.get(name, {"contract": "", "launches": []})
        rows.append((Cell(name), Cell(owner), Cell(ran["contract"] or "-"), Cell(", ".join(ran["launches"]) or "-")))
    columns = ("stage", "callable", "contract", "operators launched, contract, backend")
    return Table("What ran each stage", columns, tuple(rows), prose=frozenset({3}))


def _tiles(replay: dict[str, Any]) -> list[Tile]:
    asked = [check for check in replay["checks"] if check["judged"]]
    broken = sum(not check["passed"] for check in asked)
    stages = [stage for case in replay["cases"] for stage in case["stages"]]
    judged = [stage for stage in stages if not stage["stand_in"]]
    rows = sum(stage["rows"]["varying"] for stage in judged)
    peers = sum(stage["peer_rows"]["varying"] for stage in stages)
    stand_ins = len({stage["name"] for stage in stages if stage["stand_in"]})
    verdict: State = good(not broken) if asked else "none"
    detail = f"cases: {len(replay['cases'])}" + (f"; stages with a stand-in: {stand_ins}" if stand_ins else "")
    first = next((case["first_drift"] for case in replay["cases"] if case["first_drift"]), None)
    checked = sum(stage["rows"]["checked"] for stage in judged)
    equal = sum(stage["isolated"]["same"] for stage in stages)
    return [
        Tile("Claims", f"{len(asked) - broken} of {len(asked)} hold", detail, verdict, "tables"),
        Tile(
            "The peer's bits",
            f"{equal} of {len(stages)}",
            "stages that have them, fed by the peer",
            good(True) if equal == len(stages) else "none",
            "tables",
        ),
        Tile(
            "First drift",
            first or "none",
            "first stage whose bits are not the peer's",
            "none" if first else good(True),
            "tables",
        ),
        Tile(
            "Our rows that vary",
            f"{rows:,}",
            f"of {checked:,}, alone, in half of the rows, beside another sequence",
            good(not rows),
            "tables",
        ),
        Tile("The peer's rows that vary", f"{peers:,}", "the same check of the peer", "none", "tables"),
    ]
