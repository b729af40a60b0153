"""From recorded results to what the page shows: plain rows and verdicts, no HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from samebits.bench import show, targets
from samebits.report.load import Recorded

State = Literal["good", "bad", "open", "none"]
"""``open``: measured, no verdict. ``none``: not run."""
FOUR = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance")
COMMANDS = {
    "checks": "samebits check OPERATOR --json check.json",
    "audit": "samebits audit --json audit.json",
    "models": "make demo",
    "bench": "samebits bench OPERATOR --out OPERATOR.jsonl  (needs a GPU)",
}
_STATUS: dict[str, State] = {
    "pass": "good",
    "fail": "bad",
    "not run": "bad",
    "not asked": "none",
    "not claimed": "none",
    "n/a": "none",
}


@dataclass(frozen=True)
class Tile:
    title: str
    value: str
    detail: str
    state: State
    anchor: str


@dataclass(frozen=True)
class Cell:
    text: str
    state: State = "open"
    detail: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    numeric: frozenset[int] = frozenset()
    """Columns set flush right."""
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    environment: dict[str, str]
    tiles: tuple[Tile, ...]
    checks: tuple[Table, ...] = ()
    audit: tuple[Table, ...] = ()
    models: tuple[Table, ...] = ()
    bench: tuple[Table, ...] = ()
    times: tuple[Table, ...] = ()
    run: frozenset[str] = frozenset()
    """The sections that were run; every other one is shown as missing."""
    commands: dict[str, str] = field(default_factory=lambda: COMMANDS)


def page(recorded: Recorded, environment: dict[str, str]) -> Page:
    return Page(
        environment=environment,
        tiles=(_check_tile(recorded), _audit_tile(recorded), _model_tile(recorded), _bench_tile(recorded)),
        checks=tuple(_checks(recorded.checks or ())),
        audit=tuple(_audit(recorded.audit)) if recorded.audit else (),
        models=tuple(table for model in recorded.models or () for table in _model(model)),
        bench=_targets(recorded.bench or ()),
        times=_times(recorded.bench or ()),
        run=frozenset(name for name in ("checks", "audit", "models", "bench") if getattr(recorded, name) is not None),
    )


# --- tiles ------------------------------------------------------------------------------------------------------------


def _check_tile(recorded: Recorded) -> Tile:
    if recorded.checks is None:
        return Tile("Checks", "not run", COMMANDS["checks"], "none", "checks")
    passed = sum(bool(report["passed"]) for report in recorded.checks)
    total = len(recorded.checks)
    compared = sum(check["comparisons"] for report in recorded.checks for check in report["checks"])
    return Tile(
        "Checks",
        f"{passed} of {total}",
        f"candidates passed; {compared:,} comparisons",
        _good(passed == total),
        "checks",
    )


def _audit_tile(recorded: Recorded) -> Tile:
    if recorded.audit is None:
        return Tile("Audit", "not run", COMMANDS["audit"], "none", "audit")
    reports = recorded.audit["reports"]
    findings = sum(len(report["findings"]) for report in reports)
    arches = ", ".join(dict.fromkeys(report["arch"] for report in reports if report["arch"]))
    return Tile(
        "Audit",
        f"{findings} findings",
        f"{len(reports)} kernels on {arches}",
        _good(bool(recorded.audit["clean"])),
        "audit",
    )


def _model_tile(recorded: Recorded) -> Tile:
    if recorded.models is None:
        return Tile("Model boundaries", "not run", COMMANDS["models"], "none", "models")
    failed = [check["name"] for model in recorded.models for check in model["checks"] if not check["passed"]]
    firsts = [model["first"]["name"] for model in recorded.models if model.get("first")]
    detail = f"first difference at {firsts[0]}" if firsts else "no boundary differs"
    value = f"{len(failed)} failed" if failed else "as expected"
    return Tile("Model boundaries", value, detail, _good(not failed), "models")


def _bench_tile(recorded: Recorded) -> Tile:
    if recorded.bench is None:
        return Tile("Speed", "not run", COMMANDS["bench"], "none", "bench")
    verdicts, unheard = targets.judge(recorded.bench)
    met = sum(verdict.met is True for verdict in verdicts)
    measured = [line for line in recorded.bench if "skipped" not in line]
    checked = sum(line["bits_checked"] for line in measured)
    total = len(verdicts) + len(unheard)
    value = f"{met} of {total} targets" if total else f"{len(measured)} rows"
    good = met == total and checked == len(measured)
    return Tile("Speed", value, f"bits verified in {checked} of {len(measured)} rows", _good(good), "bench")


def _good(condition: bool) -> State:
    return "good" if condition else "bad"


# --- checks -----------------------------------------------------------------------------------------------------------


def _checks(reports: Sequence[dict[str, Any]]) -> Iterable[Table]:
    for candidate in dict.fromkeys(report["candidate"] for report in reports):
        mine = [report for report in reports if report["candidate"] == candidate]
        names = tuple(dict.fromkeys((*FOUR, *(check["name"] for report in mine for check in report["checks"]))))
        rows, notes = [], []
        for report in mine:
            options = report["options"]
            found = {check["name"]: check for check in report["checks"]}
            where = [str(options.get(key) or "default") for key in ("contract", "backend")]
            device = report.get("environment", {}).get("device_name", "")
            place = f"{options.get('device', '')} ({device})" if device else str(options.get("device", ""))
            cells = [Cell(text) for text in (*where, place)]
            cells += [_check_cell(found.get(name)) for name in names]
            rows.append(tuple(cells))
            notes += _failures(report, where)
        columns = ("contract", "backend", "device", *(name.replace("_", " ") for name in names))
        judged = mine[0].get("judged_against", "")
        yield Table(
            candidate, columns, tuple(rows), tuple(notes), caption=f"accuracy judged against {judged}" if judged else ""
        )


def _check_cell(check: dict[str, Any] | None) -> Cell:
    if check is None:
        return Cell("not run", "none")
    return Cell(check["status"], _STATUS.get(check["status"], "open"), check["summary"])


def _failures(report: dict[str, Any], where: Sequence[str]) -> list[str]:
    return [
        f"{'/'.join(where)}: {check['name']}: {failure['result']}, {failure['label']}: {failure['what']}; "
        f"reproduce: {failure['reproduce']}"
        for check in report["checks"]
        for failure in check["failures"]
    ]


# --- audit ------------------------------------------------------------------------------------------------------------


def _audit(result: dict[str, Any]) -> Iterable[Table]:
    """A summary by operator, backend and architecture; the kernels below it; findings in full."""
    reports = result["reports"]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for report in reports:
        groups.setdefault((report["op"] or "(file)", report["backend"] or "", report["arch"] or ""), []).append(report)
    rows = []
    for (op, backend, arch), members in groups.items():
        findings = sum(len(member["findings"]) for member in members)
        most = max(((member["resources"] or {}).get("registers") or 0) for member in members)
        state = _good(all(member["verdict"] in ("clean", "ok", "pass") or not member["findings"] for member in members))
        rows.append(
            (
                Cell(op),
                Cell(backend),
                Cell(arch),
                Cell(str(len(members))),
                Cell(str(most or "-")),
                Cell(str(findings), state),
            )
        )
    notes = [
        f"{report['op']} {report['backend']} {report['kernel']} {report['arch']}: {finding['rule']}: "
        + "; ".join(
            f"{key} {value}"
            for key, value in finding.items()
            if key not in ("rule",) and value not in (None, "", [], 0)
        )
        for report in reports
        for finding in report["findings"]
    ]
    compilers = ", ".join(f"{name} {version}" for name, version in result.get("compilers", {}).items())
    columns = ("operator", "backend", "arch", "kernels", "most registers", "findings")
    yield Table(
        "By operator",
        columns,
        tuple(rows),
        tuple(notes),
        frozenset({3, 4, 5}),
        f"compiled with {compilers}" if compilers else "",
    )
    kernels = tuple(
        (
            Cell(report["kernel"]),
            Cell(report["arch"] or ""),
            Cell(", ".join(report["contracts"])),
            Cell(str((report["resources"] or {}).get("registers") or "-")),
            Cell(report["verdict"], _good(not report["findings"])),
        )
        for report in reports
    )
    headings = ("kernel", "arch", "contracts", "registers", "verdict")
    yield Table("Every kernel", headings, kernels, numeric=frozenset({3}), folded=True)


# --- models -----------------------------------------------------------------------------------------------------------


def _model(model: dict[str, Any]) -> Iterable[Table]:
    title = model["title"]
    first = model.get("first")
    caption = f"first differing boundary: {first['name']}" if first else "no boundary differs"
    contracts = ", ".join(f"{op} {name}" for op, name in model.get("contracts", {}).items())
    caption += f"; on {model.get('device', '?')}, transformers {model.get('transformers', '?')}; contracts: {contracts}"
    yield Table(
        f"{title}: boundaries in the order of the run",
        _BOUNDARY,
        _boundaries(model["chained"], first),
        (),
        _NUMBERS,
        caption,
    )
    if model.get("isolated"):
        note = "each replaced module on the inputs of the unpatched run, so that a difference is its own"
        yield Table(
            f"{title}: replaced modules alone", _BOUNDARY, _boundaries(model["isolated"], None), (), _NUMBERS, note
        )
    rows = tuple(
        (Cell(c["name"]), Cell("holds" if c["passed"] else "broken", _good(c["passed"])), Cell(c["detail"]))
        for c in model["checks"]
    )
    yield Table(f"{title}: what must hold", ("claim", "verdict", "detail"), rows)
    if model.get("findings"):
        seen = tuple((Cell(f["question"]), Cell(f["answer"])) for f in model["findings"])
        yield Table(f"{title}: what was seen", ("question", "answer"), seen)


_BOUNDARY = ("boundary", "dtype", "differing", "of", "max abs", "max ulp", "first at", "bits: ours", "theirs")
_NUMBERS = frozenset({2, 3, 4, 5})


def _boundaries(differences: Sequence[dict[str, Any]], first: dict[str, Any] | None) -> tuple[tuple[Cell, ...], ...]:
    """Differing is a measurement, not a fault; only the first one is marked."""
    rows = []
    for entry in differences:
        same = entry["differing"] == 0
        marked = first is not None and entry["name"] == first["name"]
        rows.append(
            (
                Cell(entry["name"], "bad" if marked else "open", entry.get("note", "")),
                Cell(entry["dtype"]),
                Cell("same bits", "good") if same else Cell(f"{entry['differing']:,}"),
                Cell(f"{entry['elements']:,}"),
                Cell("" if entry.get("max_abs") is None else f"{entry['max_abs']:.3g}"),
                Cell("" if entry.get("max_ulp") is None else f"{entry['max_ulp']:,}"),
                Cell("" if not entry.get("first") else str(list(entry["first"]))),
                Cell(entry.get("ours_bits", "")),
                Cell(entry.get("theirs_bits", "")),
            )
        )
    return tuple(rows)


# --- bench ------------------------------------------------------------------------------------------------------------


def _targets(lines: Sequence[dict[str, Any]]) -> tuple[Table, ...]:
    verdicts, unheard = targets.judge(lines)
    if not verdicts and not unheard:
        return ()
    words: dict[bool | None, Cell] = {
        True: Cell("met", "good"),
        False: Cell("missed", "bad"),
        None: Cell("not measured", "none"),
    }
    rows = [
        (
            Cell(f"{v.row['op']} {v.row['direction']}"),
            Cell(str(v.row["shape"]["T"])),
            Cell(v.row["contract"]),
            Cell("FP32" if "float32" in v.row["dtype"] else "model"),
            Cell(v.target.text),
            Cell("-" if v.value is None else f"{v.value:.3g}"),
            words[v.met],
            Cell(f"{v.row['us']:.2f}"),
            Cell(f"{v.floor_us:.2f}"),
            Cell(f"{v.over_floor:.2f}x"),
        )
        for v in verdicts
    ]
    columns = ("case", "T", "contract", "gradients", "target", "reached", "verdict", "us", "floor us", "over floor")
    note = "floor: bytes of each tensor once, over the copy bandwidth measured in the same run, plus an empty kernel"
    missing = tuple(f"no measured row: {text}" for text in unheard)
    return (Table("Targets", columns, tuple(rows), missing, frozenset({1, 5, 7, 8, 9}), note),)


def _times(lines: Sequence[dict[str, Any]]) -> tuple[Table, ...]:
    return tuple(
        _operator_times(op, [line for line in lines if line["op"] == op])
        for op in dict.fromkeys(line["op"] for line in lines)
    )


def _operator_times(op: str, lines: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for line in lines for name in line.get("peers", {})))
    rows = []
    for line in lines:
        if "skipped" in line:
            continue
        peers = [line["peers"].get(name) for name in names]
        rows.append(
            (
                Cell(line["direction"]),
                Cell(f"{line['shape']['T']:,}"),
                Cell(show.shape_text(line)),
                Cell(line["contract"]),
                Cell(line["backend"]),
                Cell("FP32" if "float32" in line["dtype"] else "model"),
                Cell(
                    f"{line['us']:.2f}", "open", f"{line['us_min']:.2f} to {line['us_max']:.2f}, {line.get('plan', '')}"
                ),
                Cell(f"{line['copy_fraction']:.3f}"),
                Cell(f"{line.get('host_us', 0):.1f}"),
                Cell(f"{line['extra_bytes'] / 1e6:.2f}"),
                Cell(
                    "verified" if line["bits_checked"] else "NOT verified",
                    _good(line["bits_checked"]),
                    line.get("bits", ""),
                ),
                *(Cell(f"{peer['us']:.1f} ({peer['ratio']:.2f}x)") if peer else Cell("") for peer in peers),
            )
        )
    columns = (
        "dir",
        "T",
        "shape",
        "contract",
        "backend",
        "gradients",
        "us",
        "of copy",
        "host us",
        "extra MB",
        "bits",
        *names,
    )
    stamp = next((line for line in lines if "skipped" not in line), None)
    where = ""
    if stamp is not None:
        where = f"{stamp['gpu']}, driver {stamp['driver']}, torch {stamp['torch']}, commit {stamp['commit'][:12]}"
        where += "; peers: us and times ours"
    numeric = frozenset({1, 6, 7, 8, 9, *range(11, 11 + len(names))})
    return Table(
        f"{op}: every measured row", columns, tuple(rows), tuple(show.notes(lines)), numeric, where, folded=True
    )
