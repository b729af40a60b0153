"""Write the page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from samebits import environment
from samebits.report import charts, view
from samebits.report.load import Recorded


def render(recorded: Recorded, stamp: dict[str, str] | None = None) -> str:
    """The whole page as one self-contained text: styles and charts are inside."""
    from jinja2 import Environment, StrictUndefined

    template = files("samebits.report") / "templates" / "index.html.j2"
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = view.page(recorded, stamp or environment.collect().to_json())
    drawn: tuple[charts.Chart, ...] = ()
    note = ""
    if recorded.bench:
        try:
            drawn = charts.speed(recorded.bench)
        except ModuleNotFoundError as error:
            note = f"No charts: the module {error.name!r} is not installed (pip install 'samebits[report]')."
    return made.from_string(template.read_text()).render(page=page, charts=drawn, chart_note=note)


def write(recorded: Recorded, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(render(recorded))
    return path
