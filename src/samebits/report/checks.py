"""Check results as tables: a verdict per check, the words behind it, and what a failure looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from samebits.report.parts import Cell, State, Table

FOUR = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance")
_STATUS: dict[str, State] = {"pass": "good", "fail": "bad", "not run": "bad", "not asked": "none"}


def tables(reports: Sequence[dict[str, Any]]) -> Iterable[Table]:
    """One table per candidate, then one for all of them with what each check compared."""
    for candidate in dict.fromkeys(report["candidate"] for report in reports):
        mine = [report for report in reports if report["candidate"] == candidate]
        notes = tuple(f"{_where(report)}: {line}" for report in mine for line in _failures(report))
        yield _verdicts(candidate, mine, notes)
    if reports:
        yield _words("What each check compared", reports, folded=True)


def failing_example(report: dict[str, Any]) -> tuple[Table, ...]:
    """A candidate that is there to fail: the same verdicts as ours, then every place where the bits differ."""
    failures = [(check["name"], failure) for check in report["checks"] for failure in check["failures"]]
    rows = tuple(
        (
            Cell(name.replace("_", " ")),
            Cell(failure["result"]),
            Cell(failure["label"] + (f" (and {failure['also']} more alike)" if failure.get("also") else "")),
            Cell(failure["what"]),
        )
        for name, failure in failures
    )
    columns = ("check", "result", "what was changed", "first row and column that differ")
    verdicts = _verdicts(report["candidate"], [report], ())
    if not rows:
        return (verdicts,)
    again = tuple(dict.fromkeys(failure["reproduce"] for _, failure in failures))
    note = "below the table, the commands that show each of them again"
    return (verdicts, Table("Where the bits differ", columns, rows, again, prose=frozenset({2, 3}), caption=note))


def varies(report: dict[str, Any]) -> bool:
    return any(check["status"] == "fail" and check["name"].endswith("invariance") for check in report["checks"])


def _verdicts(candidate: str, reports: Sequence[dict[str, Any]], notes: tuple[str, ...]) -> Table:
    names = tuple(dict.fromkeys((*FOUR, *(check["name"] for report in reports for check in report["checks"]))))
    rows = []
    for report in reports:
        options = report["options"]
        found = {check["name"]: check for check in report["checks"]}
        device = report.get("environment", {}).get("device_name", "")
        place = f"{options.get('device', '')} ({device})" if device else str(options.get("device", ""))
        cells = [Cell(_contract(report)), Cell(str(options.get("backend") or "-")), Cell(place)]
        rows.append((*cells, *(_verdict(found.get(name)) for name in names)))
    columns = ("contract", "backend", "device", *(name.replace("_", " ") for name in names))
    judged = reports[0].get("judged_against", "")
    caption = f"accuracy judged against {judged}" if judged else ""
    return Table(candidate, columns, tuple(rows), notes, caption=caption)


def _verdict(check: dict[str, Any] | None) -> Cell:
    if check is None:
        return Cell("not run", "none")
    return Cell(check["status"], _STATUS.get(check["status"], "open"), check["summary"])


def _contract(report: dict[str, Any]) -> str:
    return str(report["options"].get("contract") or "-")


def _where(report: dict[str, Any]) -> str:
    return f"{_contract(report)}/{report['options'].get('backend') or 'default'}"


def _failures(report: dict[str, Any]) -> Iterable[str]:
    for check in report["checks"]:
        for failure in check["failures"]:
            place = f"{check['name']}: {failure['result']}, {failure['label']}: {failure['what']}"
            yield f"{place}; reproduce: {failure['reproduce']}"


def _words(title: str, reports: Sequence[dict[str, Any]], folded: bool) -> Table:
    rows = tuple(
        (
            Cell(report["candidate"]),
            Cell(_where(report)),
            Cell(check["name"].replace("_", " ")),
            _verdict(check),
            Cell(f"{check['comparisons']:,}"),
            Cell(check["summary"]),
        )
        for report in reports
        for check in report["checks"]
    )
    columns = ("candidate", "contract/backend", "check", "verdict", "comparisons", "in words")
    return Table(title, columns, rows, numeric=frozenset({4}), prose=frozenset({5}), folded=folded)
