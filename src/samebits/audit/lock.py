"""The committed record of our machine code: for every kernel what was compiled, and the opcodes and resources that came out.

An entry is only written of code that was judged clean, and holds the fingerprint of what was compiled. As the compilers are
deterministic, a fingerprint that is still the same needs no compilation to say that the code is clean and as recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samebits.audit.code import AuditError
from samebits.audit.compile import capability
from samebits.audit.compilers import compilers
from samebits.audit.fingerprint import fingerprint
from samebits.audit.listing import Job, Unlisted, work
from samebits.audit.run import Report, Result

FORMAT = 2
Entry = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """``compiler``: built by other compilers than the lock, so its counts cannot be expected to match."""

    status: Literal["same", "changed", "compiler"]
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "lines": list(self.lines)}


def write(path: Path, result: Result, kept: Mapping[str, Entry] | None = None) -> tuple[str, ...]:
    """One line per kernel and architecture: the clean ones of ``result``, and ``kept`` ones as they are.

    Returns the keys of those with findings: they are not recorded. ValueError if kernels could not even be listed: the lock
    would seem complete.
    """
    unlisted = [report.key for report in result.reports if not report.arch]
    if unlisted:
        raise ValueError(f"the lock would be incomplete, these kernels could not be listed: {', '.join(unlisted)}")
    refused = tuple(report.key for report in result.reports if not report.clean)
    entries = {**(kept or {}), **{report.key: _entry(report) for report in result.reports if report.clean}}
    lines = [f"{json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries, key=_order)]
    text = (
        "{\n"
        f'"format": {FORMAT},\n'
        f'"compilers": {json.dumps(dict(result.compilers))},\n'
        '"kernels": {\n' + ",\n".join(lines) + "\n}\n}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return refused


def unchanged(path: Path, todo: Iterable[tuple[Job, str]]) -> dict[str, Entry]:
    """The entries that would come out the same, because exactly this was compiled for them; none without a lock."""
    try:
        recorded = _load(path)["kernels"]
    except ValueError:
        return {}
    keys = ((job.key(arch), _fingerprint(job, arch)) for job, arch in todo)
    return {key: recorded[key] for key, now in keys if now and recorded.get(key, {}).get("fingerprint") == now}


def of_others(path: Path, op: str) -> dict[str, Entry]:
    """The entries of all other operators, as they are. ValueError: no lock, or one of other compilers."""
    locked = _load(path)
    if other := _other_compilers(locked, compilers()):
        raise ValueError(f"{other}; so write the whole lock")
    return {key: entry for key, entry in locked["kernels"].items() if not _in_scope(key, {op}, {_arch(key)})}


def check_inputs(path: Path, listed: Sequence[Job | Unlisted], arches: Sequence[str]) -> Comparison:
    """Without compiling: whether the lock has every build of ``listed`` with its present fingerprint, and no other entry.

    ``listed`` are all kernels of ours. ValueError if the lock is missing or not ours to read.
    """
    locked = _load(path)
    unlisted = [one for one in listed if isinstance(one, Unlisted)]
    lines = [f"cannot be listed: {one.op}/{one.backend}/{one.label}: {one.why}" for one in unlisted]
    head = _other_compilers(locked, compilers())
    if head:
        return Comparison("compiler", (head, *lines))
    recorded = {key: entry["fingerprint"] for key, entry in locked["kernels"].items()}
    now = {job.key(arch): _fingerprint(job, arch) for job, arch in work(listed, arches)}
    numbers = {capability(arch) for arch in arches}
    for key in sorted(now, key=_order):
        if key not in recorded:
            lines.append(f"not recorded: {key}")
        elif recorded[key] != now[key]:
            lines.append(f"source, options or contract changed: {key}")
    lines += [f"stale, no build has it: {key}" for key in recorded if key not in now and _arch(key) in numbers]
    return Comparison("changed" if lines else "same", tuple(lines))


def compare(
    path: Path, result: Result, ops: Iterable[str] | None, arches: Iterable[str], sample: bool = False
) -> Comparison:
    """Differences between the lock and a fresh audit of ``ops`` (None: all) for ``arches``, or of a sample of them.

    ValueError if the lock is missing or not ours to read.
    """
    locked = _load(path)
    numbers = {capability(arch) for arch in arches}
    chosen = None if ops is None else set(ops)
    now = {report.key: report for report in result.reports}
    before = {
        key: entry
        for key, entry in locked["kernels"].items()
        if (key in now if sample else _in_scope(key, chosen, numbers))
    }
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
    head = _other_compilers(locked, dict(result.compilers))
    if head:
        return Comparison("compiler", (head, *lines))
    return Comparison("changed" if lines else "same", tuple(lines))


def _other_compilers(locked: dict[str, Any], here: Mapping[str, str]) -> str:
    """What differs, in words; empty if the compilers are those of the lock."""
    theirs = locked["compilers"]
    other = [f"{n} {theirs.get(n, 'none')} in the lock, {v} here" for n, v in here.items() if theirs.get(n) != v]
    if not other:
        return ""
    return f"built by other compilers than the lock ({'; '.join(other)}): counts may differ for that reason alone"


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


def _fingerprint(job: Job, arch: str) -> str:
    """Empty where it cannot be had, which equals no entry's."""
    try:
        return fingerprint(job, arch)
    except AuditError:
        return ""


def _order(key: str) -> tuple[str, int]:
    return key.rpartition(" ")[0], _arch(key)


def _arch(key: str) -> int:
    return capability(key.rpartition(" ")[2])


def _entry(report: Report) -> Entry:
    used = report.resources
    return {
        "fingerprint": report.fingerprint,
        "registers": used.registers if used else None,
        "stack": used.stack if used else None,
        "shared": used.shared if used else None,
        "opcodes": " ".join(f"{opcode}:{count}" for opcode, count in report.opcodes),
    }


def _in_scope(key: str, ops: set[str] | None, numbers: set[int]) -> bool:
    return (ops is None or key.partition("/")[0] in ops) and _arch(key) in numbers


def _changes(before: Entry, now: Entry) -> list[str]:
    sizes = [name for name in ("registers", "stack", "shared") if before[name] != now[name]]
    changes = [f"{name} {before[name]} -> {now[name]}" for name in sizes]
    old, new = _counts(before["opcodes"]), _counts(now["opcodes"])
    for opcode in sorted(old.keys() | new.keys()):
        if old.get(opcode, 0) != new.get(opcode, 0):
            changes.append(f"{opcode} {old.get(opcode, 0)} -> {new.get(opcode, 0)}")
    if not changes and before["fingerprint"] != now["fingerprint"]:
        changes.append("source, options or contract, with the same code")
    return changes


def _counts(text: str) -> dict[str, int]:
    return {opcode: int(count) for opcode, _, count in (part.rpartition(":") for part in text.split())}
