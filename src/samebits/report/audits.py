"""An audit as tables: a line per operator, backend and architecture, and every kernel below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samebits.report.parts import Cell, Table, good

_LOCK = {
    "same": "every kernel as in the committed record",
    "changed": "machine code differs from the committed record",
    "compiler": "not comparable with the committed record, which other compilers made",
}


def tables(result: dict[str, Any]) -> Iterable[Table]:
    reports = result["reports"]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for report in reports:
        groups.setdefault((report["op"] or "(file)", report["backend"] or "", report["arch"] or ""), []).append(report)
    rows = tuple(_row(key, members) for key, members in groups.items())
    lock = result.get("lock") or {}
    notes = tuple(line for report in reports for line in _findings(report)) + tuple(lock.get("lines", ()))
    compilers = ", ".join(f"{name} {version}" for name, version in result.get("compilers", {}).items())
    said = [f"compiled with {compilers}"] if compilers else []
    said += [_LOCK.get(lock["status"], str(lock["status"]))] if lock else []
    columns = ("operator", "backend", "arch", "kernels", "most registers", "findings")
    yield Table("By operator", columns, rows, notes, frozenset({3, 4, 5}), caption="; ".join(said))
    yield _kernels(reports)


def _row(key: tuple[str, str, str], members: list[dict[str, Any]]) -> tuple[Cell, ...]:
    findings = sum(len(member["findings"]) for member in members)
    most = max(((member["resources"] or {}).get("registers") or 0) for member in members)
    counts = (Cell(str(len(members))), Cell(str(most or "-")), Cell(str(findings), good(not findings)))
    return (*(Cell(text) for text in key), *counts)


def _findings(report: dict[str, Any]) -> Iterable[str]:
    for finding in report["findings"]:
        place = f"{report['op']} {report['backend']} {report['kernel']} {report['arch']}: {finding['rule']}"
        said = (f"{k} {v}" for k, v in finding.items() if k != "rule" and v not in (None, "", [], 0))
        yield f"{place}: {'; '.join(said)}"


def _kernels(reports: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            Cell(report["op"] or "(file)"),
            Cell(report["backend"] or ""),
            Cell(report["kernel"]),
            Cell(report["arch"] or ""),
            Cell(", ".join(report["contracts"])),
            Cell(str((report["resources"] or {}).get("registers") or "-")),
            Cell(report["verdict"], good(not report["findings"])),
        )
        for report in reports
    )
    columns = ("operator", "backend", "kernel", "arch", "contracts", "registers", "verdict")
    prose = frozenset({2, 4})
    return Table("Every kernel", columns, rows, numeric=frozenset({5}), prose=prose, folded=True)
