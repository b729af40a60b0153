"""Write the page."""

from __future__ import annotations

from pathlib import Path

from samebits import environment
from samebits.report import charts, pages, view
from samebits.report.load import Recorded


def render(recorded: Recorded, stamp: dict[str, str] | None = None) -> str:
    """The whole page as one self-contained text: styles and charts are inside."""
    page = view.page(recorded, stamp or environment.collect().to_json())
    drawn: tuple[charts.Chart, ...] = ()
    note = ""
    if recorded.bench:
        try:
            drawn = charts.speed(recorded.bench)
        except ModuleNotFoundError as error:
            note = f"No charts: the module {error.name!r} is not installed (pip install 'samebits[report]')."
    return pages.render("index.html.j2", page=page, charts=drawn, chart_note=note)


def write(recorded: Recorded, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(render(recorded))
    return path
