"""What a page is made of: tiles, tables and cells with a verdict. Plain text, no HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "bad", "open", "none"]
"""``open``: measured, no verdict. ``none``: not run, or not decided."""


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
    """Shown when the pointer rests on it; nothing that is said nowhere else."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    numeric: frozenset[int] = frozenset()
    """Columns set flush right."""
    prose: frozenset[int] = frozenset()
    """Columns whose text may be broken into lines."""
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """An SVG element as text, drawn by our own code, and what it shows in words."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Group:
    """Tables and figures about one thing, under a heading of their own."""

    title: str
    caption: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()


def good(condition: bool) -> State:
    return "good" if condition else "bad"
