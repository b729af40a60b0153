"""The tests on a GPU: which test functions are not on record, and what a run of them has proven."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samebits import catalogue
from samebits.gpu import ledger

RECORD, PROVEN = "tests.jsonl", "proven.json"
FOLDERS = ("ops", "sequence_ops")
"""Where tests of operators are."""
_MARKED = re.compile(r"\bgpu\b|Conformance\b")


def files(root: Path) -> list[Path]:
    """Test files that have tests for a GPU, those of operators first."""
    found = [path for path in sorted((root / "tests").rglob("test_*.py")) if _MARKED.search(path.read_text())]
    return sorted(found, key=lambda path: (path.parent.name not in FOLDERS, path))


def operator_of(path: Path) -> str | None:
    """The operator a test file is about, by its name: the longest that fits ``tests/<folder>/test_<op>...``."""
    if path.parent.name not in FOLDERS:
        return None
    fitting = [op for op in catalogue.names() if f"{path.stem}_".startswith(f"test_{op}_")]
    return max(fitting, key=len, default=None)


def fingerprint(root: Path, function: str) -> str:
    """Of a test function, ``tests/...::Class::name``: the code it tests and its own."""
    path = root / function.partition("::")[0]
    op = operator_of(path)
    tested = ledger.of_operator(op) if op is not None else ledger.of_everything()
    return ledger.digest((tested, *_definition(root, path, function.rpartition("::")[2])))


def proven(root: Path, book: ledger.Ledger) -> list[str]:
    """The test functions that are on record for the code as it is."""
    keys = [key for key in book.entries if "::" in key]
    return [key for key in keys if book.has(key, fingerprint(root, key))]


def passed(record: Path) -> dict[str, int]:
    """Functions all of whose cases passed, with their number, from the record of a run that may have been stopped."""
    expected: dict[str, int] = {}
    good: dict[str, int] = {}
    bad: set[str] = set()
    for told in _lines(record):
        if "expected" in told:
            expected |= told["expected"]
            continue
        function = told["test"].partition("[")[0]
        if told["outcome"] == "passed":
            good[function] = good.get(function, 0) + 1
        else:
            bad.add(function)
    return {f: n for f, n in good.items() if f not in bad and expected.get(f) == n}


def where(record: Path) -> dict[str, Any]:
    """Commit, GPU and torch of the run; it may be another machine than the one that reads the record."""
    return next((line["where"] for line in _lines(record) if "where" in line), {})


def left(root: Path, out: Path, book: ledger.Ledger) -> list[str]:
    """What is not on record: functions, as far as the last run collected them, and files of which nothing is."""
    done = set(proven(root, book))
    collected = {key for line in _lines(out / RECORD) for key in line.get("expected", ())}
    named = {key.partition("::")[0] for key in (*done, *collected)}
    unheard = [str(path.relative_to(root)) for path in files(root)]
    return [*sorted(collected - done), *(name for name in unheard if name not in named)]


def failures(record: Path) -> list[str]:
    """One line for each test that failed."""
    lines = []
    for told in _lines(record):
        if told.get("outcome", "passed") != "passed":
            reason = [part for part in told["why"].splitlines() if part.startswith("E ")] or told["why"].splitlines()
            lines.append(f"{told['test']} ({told['when']}): {' '.join(reason)[:300]}")
    return lines


def _lines(record: Path) -> Iterator[dict[str, Any]]:
    """A line that was cut off when the run was stopped is left out."""
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _definition(root: Path, path: Path, name: str) -> list[str]:
    """The source of a test function: in its own file with that whole file, or in the conformance tests with their tools."""
    shared = root / "src" / "samebits" / "verify" / "conformance"
    for place in sorted(shared.glob("*.py")):
        text = _functions(place).get(name)
        if text is not None:
            return [text, (shared / "base.py").read_text(), _assignments(path)]
    return [path.read_text()]


@functools.cache
def _functions(path: Path) -> dict[str, str]:
    text = path.read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in nodes}


@functools.cache
def _assignments(path: Path) -> str:
    """What a test class sets for the conformance tests: sizes, patterns."""
    text = path.read_text()
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    found = [one for node in classes for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)]
    return "\n".join(ast.get_source_segment(text, one) or "" for one in found)
