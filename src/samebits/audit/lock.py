"""The committed record of our machine code: opcode counts and resources of every kernel, so a change is a diff."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samebits.audit.compile import capability
from samebits.audit.run import Report, Result

FORMAT = 1


@dataclass(frozen=True)
class Comparison:
    """``compiler``: built by other compilers than the lock, so its counts cannot be expected to match."""

    status: Literal["same", "changed", "compiler"]
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "lines": list(self.lines)}


def write(path: Path, result: Result) -> None:
    """One line per kernel and architecture. ValueError if a kernel could not be read: the lock must be complete."""
    unread = [report.key for report in result.reports if report.verdict == "error"]
    if unread:
        raise ValueError(f"the lock would be incomplete, these kernels could not be read: {', '.join(unread)}")
    lines = [f"{json.dumps(report.key)}: {json.dumps(_entry(report))}" for report in sorted(result.reports, key=_order)]
    text = (
        "{\n"
        f'"format": {FORMAT},\n'
        f'"compilers": {json.dumps(dict(result.compilers))},\n'
        '"kernels": {\n' + ",\n".join(lines) + "\n}\n}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def compare(path: Path, result: Result, ops: Iterable[str] | None, arches: Iterable[str]) -> Comparison:
    """Differences between the lock and a fresh audit of ``ops`` (None: all) for ``arches``.

    ValueError if the lock is missing or not ours to read.
    """
    locked = _load(path)
    numbers = {capability(arch) for arch in arches}
    chosen = None if ops is None else set(ops)
    before = {key: entry for key, entry in locked["kernels"].items() if _in_scope(key, chosen, numbers)}
    now = {report.key: report for report in result.reports}
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            lines.append(f"removed: {key}")
        elif now[key].verdict == "error":
            lines.append(f"unreadable: {key}")
        elif key not in before:
            lines.append(f"added: {key}")
        else:
            changes = _changes(before[key], _entry(now[key]))
            if changes:
                lines.append(f"changed: {key}: {', '.join(changes)}")
    other = {
        name: (locked["compilers"].get(name, "none"), version)
        for name, version in result.compilers
        if locked["compilers"].get(name) != version
    }
    if other:
        told = "; ".join(f"{name} {theirs} in the lock, {ours} here" for name, (theirs, ours) in other.items())
        head = f"built by other compilers than the lock ({told}): counts may differ for that reason alone"
        return Comparison("compiler", (head, *lines))
    return Comparison("changed" if lines else "same", tuple(lines))


def _load(path: Path) -> dict[str, Any]:
    try:
        locked: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no lock; write it with samebits audit --write-lock") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a lock: {error}") from error
    if locked.get("format") != FORMAT:
        raise ValueError(f"{path}: lock format {locked.get('format')!r}, this version reads {FORMAT}")
    return locked


def _order(report: Report) -> tuple[str, str, str, int]:
    return report.op, report.backend, report.label, capability(report.arch)


def _entry(report: Report) -> dict[str, Any]:
    used = report.resources
    return {
        "registers": used.registers if used else None,
        "stack": used.stack if used else None,
        "shared": used.shared if used else None,
        "opcodes": " ".join(f"{opcode}:{count}" for opcode, count in report.opcodes),
    }


def _in_scope(key: str, ops: set[str] | None, numbers: set[int]) -> bool:
    op, arch = key.split("/", 1)[0], key.rsplit(" ", 1)[1]
    return (ops is None or op in ops) and capability(arch) in numbers


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    sizes = [name for name in ("registers", "stack", "shared") if before[name] != now[name]]
    changes = [f"{name} {before[name]} -> {now[name]}" for name in sizes]
    old, new = _counts(before["opcodes"]), _counts(now["opcodes"])
    for opcode in sorted(old.keys() | new.keys()):
        if old.get(opcode, 0) != new.get(opcode, 0):
            changes.append(f"{opcode} {old.get(opcode, 0)} -> {new.get(opcode, 0)}")
    return changes


def _counts(text: str) -> dict[str, int]:
    return {opcode: int(count) for opcode, _, count in (part.rpartition(":") for part in text.split())}
