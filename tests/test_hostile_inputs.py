"""``docs/hostile-inputs.md`` against the tests it names: every one exists and says which kind of input it is about."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
KINDS = {
    "A": (1, 2, 3, 5, 7, 8, 10, 11, 13),
    "B": (1, 2, 3, 5, 6, 8, 9, 11, 12, 13, 14),
    "C": (1, 2, 3, 5, 6),
    "D": (1, 3, 4, 5, 6),
    "E": (1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 17, 18, 19, 20),
    "F": (1, 3, 4, 6, 7, 9, 10, 12, 13),
    "G": (1, 3, 4, 5, 6, 8, 9),
    "H": (1, 3, 5, 6, 8, 9, 11, 12, 13, 14, 16, 17, 18),
}
PAGE = (ROOT / "docs" / "hostile-inputs.md").read_text()
ROWS = dict(re.findall(r"^\| ([A-H]\d+) \|[^|]*\|(.*)\|$", PAGE, re.MULTILINE))


@functools.cache
def functions(path: Path) -> dict[str, str]:
    """The text of every function of a file, with what introduces it: its comments and docstring."""
    text = path.read_text()
    tree = ast.parse(text)
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name: f"{ast.get_docstring(tree)}\n{ast.get_source_segment(text, node)}" for node in defined}


def test_every_kind_has_a_line() -> None:
    assert set(ROWS) == {f"{letter}{number}" for letter, numbers in KINDS.items() for number in numbers}


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_what_is_claimed_exists_and_says_so(kind: str) -> None:
    line = ROWS[kind]
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", line)
    absent = line.strip().startswith("Does not apply: ")
    assert named or absent
    for file, test in named:
        path = ROOT / "src" / "samebits" / "verify" / file if file.startswith("conformance/") else TESTS / file
        text = functions(path).get(test)
        assert text is not None, f"{kind}: {file} has no {test}"
        assert absent or re.search(rf"\b{kind}\b", text), f"{kind} is not named in {file}::{test}"


def test_every_test_named_on_the_page_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 100
    for file, test in named:
        path = ROOT / "src" / "samebits" / "verify" / file if file.startswith("conformance/") else TESTS / file
        assert test in functions(path), f"{file} has no {test}"
