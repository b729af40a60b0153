"""What has run on a GPU, with a fingerprint of the code it ran: ``tests/golden/gpu.<arch>.json``.

A key says what passed: ``tests/ops/test_x.py::TestX::test_y`` (with all its parameters), ``check/<op>``, ``golden/<op>``,
``memcheck/<op>``, ``bench/<op>`` and so on. It counts while its fingerprint is that of the code at hand.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from samebits import catalogue, registry
from samebits.audit.fingerprint import without_comments

PACKAGE = Path(__file__).resolve().parents[1]
FRAMEWORK = ("contract.py", "checks.py", "operator.py", "autograd.py", "dispatch.py", "registry.py", "exact")
"""What every operator runs through, beside its own folder, those whose kernels it launches, and what these use of ``runtime``."""
LOG = "ledger.jsonl"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
_NAMED = re.compile(r"(?:\bops[./]|[\"'])(\w+)\b")
"""An operator in a path, an import or a string; some have names that are words."""
_DIGITS = 16
_CODE = (".py", ".cu", ".cuh", ".h", ".cpp", ".xz")
"""Files that decide what is computed; an ``.xz`` is a table of values."""


@dataclass(frozen=True)
class Entry:
    """One thing that passed. ``tests`` counts the cases of a test function; it is 1 for everything else."""

    key: str
    fingerprint: str
    tests: int
    commit: str
    gpu: str
    torch: str


class Ledger:
    def __init__(self, path: Path) -> None:
        self.path = path
        stored = json.loads(path.read_text())["entries"] if path.exists() else []
        self.entries = {entry["key"]: Entry(**entry) for entry in stored}

    def has(self, key: str, fingerprint: str) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.fingerprint == fingerprint

    def record(self, entries: Iterable[Entry]) -> int:
        """Add what passed and write the file; the number of entries that are new or renewed."""
        fresh = {entry.key: entry for entry in entries if not self.has(entry.key, entry.fingerprint)}
        self.entries |= fresh
        if fresh:
            content = {"entries": [asdict(self.entries[key]) for key in sorted(self.entries)]}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(content, indent=0) + "\n")
        return len(fresh)


def note(out: Path, entry: Entry) -> None:
    """Say at once that something passed, so that it survives whatever happens to the run."""
    with (out / LOG).open("a") as stream:
        stream.write(json.dumps(asdict(entry)) + "\n")


def noted(out: Path) -> list[Entry]:
    """What a run said so far. A last line that was cut off is left out."""
    found = []
    for line in (out / LOG).read_text().splitlines() if (out / LOG).exists() else ():
        try:
            found.append(Entry(**json.loads(line)))
        except ValueError:
            continue
    return found


# --- fingerprints -----------------------------------------------------------------------------------------------------


@functools.cache
def of_operator(op: str) -> str:
    """Of everything that decides what an operator computes; comments and docstrings do not count."""
    return digest(_text(path) for path in sources_of(op))


def sources_of(op: str) -> list[Path]:
    """Those files, sorted."""
    paths = [path for name in FRAMEWORK for path in _sources(PACKAGE / name)]
    for name in (op, *lenders(op)):
        paths += _sources(_folder(name))
    paths += _used(_sources(PACKAGE / "runtime"), paths)
    return sorted({*paths, *_headers(paths)})


def _folder(op: str) -> Path:
    return PACKAGE.joinpath(*catalogue.home(op).split(".")[1:])


@functools.cache
def of_everything() -> str:
    """Of the whole package."""
    return digest(_text(path) for path in _sources(PACKAGE))


@functools.cache
def lenders(op: str) -> tuple[str, ...]:
    """The operators whose code this one names, and those that they name: their kernels may run in it, or they judge it."""
    names = set(registry.names())
    found: set[str] = set()
    todo = [op]
    while todo:
        for path in _sources(_folder(todo.pop())):
            named = set(_NAMED.findall(_text(path))) & names - found - {op}
            found |= named
            todo += named
    return tuple(sorted(found))


def digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.hexdigest()[:_DIGITS]


def _used(modules: Sequence[Path], sources: Iterable[Path]) -> list[Path]:
    """The modules that some of the sources name, or that those name."""
    found: list[Path] = []
    todo = list(sources)
    while todo:
        words = set(re.findall(r"\w+", _text(todo.pop())))
        fresh = [path for path in modules if path.stem in words and path not in found]
        found += fresh
        todo += fresh
    return found


def _headers(sources: Iterable[Path]) -> set[Path]:
    """Our general headers that some of these sources include, through others too."""
    found: set[Path] = set()
    todo = list(sources)
    while todo:
        path = todo.pop()
        if path.suffix in (".cu", ".cuh"):
            for name in _INCLUDE.findall(_text(path)):
                header = PACKAGE / "csrc" / name
                if header.exists() and header not in found:
                    found.add(header)
                    todo.append(header)
    return found


def _sources(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.rglob("*") if path.suffix in _CODE)


@functools.cache
def _text(path: Path) -> str:
    """The code of a file, its name in front."""
    if path.suffix == ".xz":
        return f"{path.relative_to(PACKAGE)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}"
    text = path.read_text()
    code = _bare(text) if path.suffix == ".py" else without_comments(text)
    return f"{path.relative_to(PACKAGE)}\n{code}"


def _bare(text: str) -> str:
    """Python without comments, docstrings and empty lines. Positions alone are used, which no version of Python prints anew."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        for one in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                lines[one.lineno - 1 : one.end_lineno] = [""] * ((one.end_lineno or one.lineno) - one.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())
