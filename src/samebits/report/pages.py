"""From plain parts to a self-contained HTML text: the look that every page shares."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from samebits.report.parts import Group, Table, Tile


@dataclass(frozen=True)
class Picture:
    """A PNG that the page carries with it."""

    name: str
    caption: str
    content: bytes

    @property
    def source(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.content).decode()}"

    @property
    def width(self) -> int:
        """On a screen: half of its pixels, since it was drawn for print."""
        return int.from_bytes(self.content[16:20], "big") // 2


@dataclass(frozen=True)
class TablesPage:
    """A page that is nothing but tiles and tables."""

    title: str
    lead: str
    environment: dict[str, str]
    """Of the machine on which it was measured."""
    tiles: Sequence[Tile]
    tables: Sequence[Table]
    groups: Sequence[Group] = ()
    command: str = ""
    """What makes the record again; empty: not known."""
    pictures: Sequence[Picture] = ()


def tables_page(page: TablesPage) -> str:
    return render("tables.html.j2", page=page)


def render(template: str, **values: Any) -> str:
    """A template of ``report/templates``; a name that it uses and was not given is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    made = Environment(
        loader=FunctionLoader(lambda name: (files("samebits.report") / "templates" / name).read_text()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made.get_template(template).render(**values)
