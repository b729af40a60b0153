"""A model comparison as tables: where it differs first, what each replaced module adds and why, what the batch changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from samebits.report.parts import Cell, Group, Table, good

_GAP = ("differing", "of", "max abs", "max ulp", "first at")
_BOUNDARY = ("boundary", "dtype", *_GAP, "bits: ours", "theirs")
_NUMBERS = frozenset({2, 3, 4, 5})


def overview(models: Sequence[dict[str, Any]]) -> Table:
    """Which boundary differs first and by how much, one line per comparison."""
    rows = []
    for model in models:
        first, last = model.get("first"), model["chained"][-1] if model["chained"] else None
        place = Cell(first["name"], "none") if first else Cell("none", "good")
        broken = sum(not check["passed"] for check in model["checks"])
        verdict = Cell(f"{broken} broken", "bad") if broken else Cell(f"{len(model['checks'])} hold", "good")
        after = f"{last['differing']:,} of {last['elements']:,}" if last else "-"
        gap = _gap(first) if first else tuple(Cell("") for _ in (*_GAP, "ours", "theirs"))
        rows.append((Cell(model["title"]), place, *gap, Cell(after), verdict))
    columns = ("comparison", "first boundary", *_GAP, "bits: ours", "theirs", "after the last", "claims")
    prose = frozenset({0})
    return Table("Where they first differ", columns, tuple(rows), numeric=frozenset({2, 3, 4, 5, 9}), prose=prose)


def group(model: dict[str, Any]) -> Group:
    contracts = ", ".join(f"{op} {name}" for op, name in model.get("contracts", {}).items())
    caption = f"on {model.get('device', '?')}, transformers {model.get('transformers', '?')}; contracts: {contracts}"
    return Group(model["title"], caption, tuple(_tables(model)))


def _tables(model: dict[str, Any]) -> Iterable[Table]:
    yield _claims(model["checks"])
    if model.get("isolated"):
        note = "each replaced module on the inputs of the unpatched run, so that a difference is its own"
        alone = _boundaries(model["isolated"], None)
        yield Table("Replaced modules alone", _BOUNDARY, alone, numeric=_NUMBERS, caption=note)
    if model.get("causes"):
        yield _causes(model["causes"])
    if model.get("rows"):
        yield _rows(model["rows"])
    if model.get("split"):
        yield _split(model["split"])
    if model.get("findings"):
        seen = tuple((Cell(f["question"]), Cell(f["answer"])) for f in model["findings"])
        yield Table("What was seen", ("question", "answer"), seen, prose=frozenset({0, 1}))
    if model.get("sites"):
        yield _sites(model["sites"])
    first = model.get("first")
    caption = f"first differing boundary: {first['name']}" if first else "no boundary differs"
    chained = _boundaries(model["chained"], first)
    note = f"{caption}; what differs at one boundary is passed on to the next"
    yield Table("Every boundary, in the order of the run", _BOUNDARY, chained, (), _NUMBERS, caption=note, folded=True)


def _claims(checks: Sequence[dict[str, Any]]) -> Table:
    """With a column of details only where there are any."""
    detailed = any(check["detail"] for check in checks)
    rows = []
    for check in checks:
        cells = (Cell(check["name"]), Cell("holds" if check["passed"] else "broken", good(check["passed"])))
        rows.append((*cells, Cell(check["detail"])) if detailed else cells)
    columns = ("claim", "verdict", "detail") if detailed else ("claim", "verdict")
    return Table("What must hold", columns, tuple(rows), prose=frozenset({0, 2}))


def _gap(entry: dict[str, Any]) -> tuple[Cell, ...]:
    """Columns ``_GAP`` and both bit patterns. Differing is a measurement, not a fault."""
    return (
        Cell(f"{entry['differing']:,}") if entry["differing"] else Cell("same bits", "good"),
        Cell(f"{entry['elements']:,}"),
        Cell("" if entry.get("max_abs") is None else f"{entry['max_abs']:.3g}"),
        Cell("" if entry.get("max_ulp") is None else f"{entry['max_ulp']:,}"),
        Cell("" if not entry.get("first") else str(list(entry["first"]))),
        Cell(entry.get("ours_bits", "")),
        Cell(entry.get("theirs_bits", "")),
    )


def _boundaries(differences: Sequence[dict[str, Any]], first: dict[str, Any] | None) -> tuple[tuple[Cell, ...], ...]:
    """Only the first differing one is marked."""
    rows = []
    for entry in differences:
        marked = first is not None and entry["name"] == first["name"]
        note = f" ({entry['note']})" if entry.get("note") else ""
        name = Cell(f"{entry['name']}{note}", "none" if marked else "open")
        rows.append((name, Cell(entry["dtype"]), *_gap(entry)))
    return tuple(rows)


def _causes(causes: Sequence[dict[str, Any]]) -> Table:
    """A line per habit of the class; the last one of a module says what no habit explains."""
    rows = []
    for cause in causes:
        for step in cause["steps"]:
            left = Cell("")
            if step is cause["steps"][-1]:
                left = Cell(f"{cause['unexplained']:,}", "none" if cause["unexplained"] else "good")
            moved = (Cell(f"{step['moved']:,}"), Cell(f"{cause['elements']:,}"))
            rows.append((Cell(cause["module"]), Cell(step["habit"]), *moved, left))
    note = "measured: the contract takes over one habit of the class after the other, and what each moves is counted"
    columns = ("module", "what the class does and the contract does not", "elements moved", "of", "unexplained")
    numeric, prose = frozenset({2, 3, 4}), frozenset({1})
    return Table("Why they differ", columns, tuple(rows), numeric=numeric, prose=prose, caption=note)


def _rows(checks: Sequence[dict[str, Any]]) -> Table:
    """Both models side by side; a verdict only for our operators, which answer for it."""
    found: dict[tuple[str, str], dict[bool, dict[str, Any]]] = {}
    for check in checks:
        found.setdefault((f"{check['module']}.{check['boundary']}", check["given"]), {})[check["patched"]] = check
    rows = []
    for (name, given), sides in found.items():
        cells = []
        for patched in (True, False):
            side = sides.get(patched)
            text = f"{side['varying']} of {side['rows']}" if side else "-"
            cells.append(Cell(text, good(not side["varying"])) if patched and side else Cell(text))
        rows.append((Cell(name), Cell(given), *cells))
    note = "rows run alone and in halves of the batch, beside the same rows in the whole batch, given the same bits each time"
    columns = ("boundary", "the row was given", "rows that vary: ours", "the class")
    return Table("Does a row vary with the batch?", columns, tuple(rows), numeric=frozenset({2, 3}), caption=note)


def _sites(sites: dict[str, int]) -> Table:
    rows = tuple((Cell(name), Cell(str(hits), good(hits == 1))) for name, hits in sites.items())
    note = "every place of the model where an operator of ours runs, and how often one run passed it"
    return Table("Call sites", ("site", "hits"), rows, numeric=frozenset({1}), caption=note, folded=True)


def _split(split: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for entry in split:
        who, _, name = entry["name"].partition(": ")
        model = Cell({"ours": "with our operators", "theirs": "the class"}.get(who, who))
        if entry["differing"]:
            rows.append((model, Cell(name), *_gap(entry)))
        else:
            rows.append((model, Cell("none: same bits everywhere", "good"), *[Cell("")] * (len(_GAP) + 2)))
    columns = ("model", "first boundary that differs", *_GAP, "bits: alone", "in the batch")
    note = "sequence 0 run alone beside sequence 0 of the batch"
    return Table("One sequence alone and in the batch", columns, tuple(rows), numeric=_NUMBERS, caption=note)
