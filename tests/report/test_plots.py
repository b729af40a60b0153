"""Figures for print: every number of the record at its place, everything inside the figure, in letters that can be read."""

from __future__ import annotations

import copy
import math
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from report.test_replays import CASE, ERROR, REPLAY, SAME, STAGE, TIMED
from typer.testing import CliRunner

from samebits import cli
from samebits.cli import figures
from samebits.report import load, plots
from samebits.report.pages import TablesPage
from samebits.report.plots import style

PAGE = TablesPage("A title", "", {}, (), ())

ROOT = Path(__file__).parents[2]
OFF = SAME | {"same": False, "differing": 2}
ROWS = STAGE["rows"]
STAMPED = REPLAY | {"environment": {"torch": "2.13", "commit": "c" * 40}}
LEAF = {"name": "attn.to_q.weight", "peer_repeat": True, "chained": OFF, "error": ERROR, "peer_error": ERROR}
GRADIENTS = {"leaves": [LEAF], "nodes": [{"name": "norm1", "isolated": {"x": SAME, "scale": OFF}}]}
BLOCK = STAMPED | {"stage": "block", "cases": [CASE | {"gradients": GRADIENTS}]}
BOUNDARY = {"chained": OFF, "isolated": None, "rms": 1e-3, "peer_rms": 2e-3, "rows": ROWS, "peer_rows": ROWS}
NAMES = ("proj_in", *(f"transformer_blocks.{block}" for block in range(50)), "norm_out")
WHOLE = {"title": "tiny, S = 264", "layout": "tiny", "boundaries": [BOUNDARY | {"name": name} for name in NAMES]}
STEP = {"rows_apart": 0.0, "velocity_apart": 2e-3, "forced_apart": 1e-3, "rms": 1e-3, "peer_rms": 2e-3}
GENERATED = {"title": "tiny, 3 steps", "request": {"layout": "tiny"}, "steps": [STEP | {"step": at} for at in range(3)]}
RECORDS = {
    "conditioning": STAMPED,
    "block": BLOCK,
    "model": STAMPED | {"stage": "model", "cases": [WHOLE]},
    "generation": STAMPED | {"stage": "generation", "cases": [GENERATED]},
}


def drawn(record, name) -> Figure:
    return next(plot for plot in plots.plots(record) if plot.name == name).draw()


def points(figure: Figure, label: str, panel: int = 0) -> list[tuple[float, float]]:
    (line,) = (line for line in figure.axes[panel].lines if line.get_label() == label)
    return [(round(float(x), 3), round(float(y), 3)) for x, y in zip(*line.get_data(), strict=True)]


def changed(record, **stage):
    made = copy.deepcopy(record)
    made["cases"][0]["stages"][0].update(stage)
    return made


def unreadable(figure: Figure) -> list[str]:
    """Texts that are cut off at an edge, or smaller than 6 points."""
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert len(texts) > 4
    whole = figure.bbox.padded(0.5)
    boxes = {text: text.get_window_extent() for text in texts}
    inside = [text for text, box in boxes.items() if whole.contains(*box.min) and whole.contains(*box.max)]
    return [text.get_text() for text in texts if text not in inside or text.get_fontsize() < 6]


@pytest.mark.parametrize("stage", RECORDS)
def test_everything_can_be_read_at_the_width_of_a_column(stage: str):
    for plot in plots.plots(RECORDS[stage]):
        figure = plot.draw()
        assert figure.get_figwidth() in (style.COLUMN, style.TEXT)
        assert unreadable(figure) == [], plot.name


def test_a_text_that_is_cut_off_would_be_seen():
    figure = drawn(BLOCK, "nodes-error")
    figure.text(0.9, 0.5, "too long for its place")
    figure.text(0.5, 0.5, "too small", size=5)
    assert unreadable(figure) == ["too long for its place", "too small"]


def test_bits_that_differ_leave_the_place_of_zero():
    same = drawn(BLOCK, "nodes-agreement")
    (chained,), (isolated,) = points(same, "chained"), points(same, "isolated")
    assert chained == isolated and chained[0] < 0
    differ = drawn(changed(BLOCK, isolated=OFF), "nodes-agreement")
    assert points(differ, "chained")[0][0] < 0
    assert points(differ, "isolated") == [(0.398, 0.0)]  # log10(2 / 8) on an axis that begins at 0.1


def test_rows_that_vary_are_shares_of_those_checked():
    figure = drawn(BLOCK, "nodes-rows")
    assert points(figure, "samebits") == [(-0.16, 0.0)]
    assert points(figure, "diffusers") == [(round(1 + math.log10(2 / 3), 3), 0.0)]
    ours = drawn(changed(BLOCK, rows=ROWS | {"varying": 3}), "nodes-rows")
    assert points(ours, "samebits") == [(1.0, 0.0)]  # all: the end of an axis of one decade


def test_an_error_that_is_not_finite_is_shown_as_such():
    figure = drawn(changed(BLOCK, error=ERROR | {"relative": None}), "nodes-error")
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    ((ours, _),) = points(figure, "samebits")
    assert labels[-1] == "not\nfinite" and ours == pytest.approx(figure.axes[0].get_xticks()[-1], abs=1e-3)
    assert ours > points(figure, "diffusers")[0][0]


def test_what_the_peer_does_not_repeat_has_another_mark():
    record = copy.deepcopy(BLOCK)
    assert points(drawn(record, "gradients-error"), "diffusers")
    record["cases"][0]["gradients"]["leaves"][0]["peer_repeat"] = False
    figure = drawn(record, "gradients-error")
    assert points(figure, "diffusers, varies by run")
    assert "diffusers" not in [line.get_label() for line in figure.axes[0].lines]
    assert points(drawn(STAMPED, "gradients-rounding"), "diffusers, varies by run") == [(1.0, 0.0)]


def test_latencies_are_a_figure_where_the_record_has_them():
    assert "latency" not in [plot.name for plot in plots.plots(BLOCK)]
    record = changed(BLOCK, latency_us=TIMED)
    figure = drawn(record, "latency")
    ours, peers = (points(figure, label)[0][0] for label in ("samebits", "diffusers"))
    assert peers - ours == pytest.approx(math.log10(2), abs=2e-3) and unreadable(figure) == []
    (plot,) = (plot for plot in plots.shown(record) if plot.name == "latency")
    assert "median of CUDA-graph <replays>; diffusers by its own operations" in plot.caption


def test_cases_lie_in_lanes_from_the_top():
    second = copy.deepcopy(BLOCK["cases"][0]) | {"title": "T = 4, S = 9"}
    second["stages"][0]["isolated"] = OFF
    figure = drawn(BLOCK | {"cases": [BLOCK["cases"][0], second]}, "nodes-agreement")
    (first, upper), (other, lower) = points(figure, "isolated")
    assert first < 0 < other and -0.5 < upper < 0 < lower < 0.5
    assert figure.axes[0].yaxis_inverted() and "T = 3, S = 5; T = 4, S = 9" in figure.get_supxlabel()


def test_a_part_that_has_no_isolated_run_has_no_point():
    figure = drawn(RECORDS["model"], "depth-tiny")
    assert len(points(figure, "chained", 1)) == len(NAMES)
    assert all(y != y for _, y in points(figure, "isolated", 1))
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()][1] == "block 0"


@pytest.mark.parametrize("form", plots.FORMATS)
def test_the_same_record_gives_the_same_bytes(form: str):
    one, two = (style.encoded(drawn(BLOCK, "backward"), form) for _ in range(2))
    assert one == two
    assert one.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[form])
    if form == "png":
        assert struct.unpack(">I", one[16:20])[0] == round(style.COLUMN * style.DPI)


def call(*words):
    words = [str(word) for word in words]
    return CliRunner().invoke(cli.build(words), words)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    figures.leave(BLOCK, PAGE, None, tmp_path / "r.json", None)
    return tmp_path / "r.json"


def test_the_command_draws_what_is_asked_for(record: Path, tmp_path: Path):
    result = call("figures", record, "--out", tmp_path / "f", "--only", "backward", "--format", "svg")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["backward.svg", "captions.txt"]
    caption = (tmp_path / "f" / "captions.txt").read_text()
    assert caption.startswith("backward.svg: ") and "on cpu, torch 2.13, commit cccccccccccc." in caption
    assert plots.digest(BLOCK) in caption and plots.digest(STAMPED) not in caption


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "gif"], "choose png, pdf, svg"),
        (["--only", "x"], "no figure 'x' of this record; choose nodes, nodes-agreement"),
    ],
)
def test_wrong_use(record: Path, tmp_path: Path, words, said):
    result = call("figures", record, "--out", tmp_path / "f", *words)
    assert result.exit_code == 2 and said in result.output and not (tmp_path / "f").exists()


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "x.json"
    for content, said in (("{}", "not a replay result, it lacks 'stage'"), ("[", "not JSON")):
        path.write_text(content)
        result = call("figures", path)
        assert result.exit_code == 2 and said in result.output
    with pytest.raises(ValueError, match="its stage is 'layer'"):
        plots.plots(STAMPED | {"stage": "layer"})


def test_without_matplotlib_the_rest_is_left(tmp_path: Path, monkeypatch, capsys):
    from rich.console import Console

    def absent(*_):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(plots, "write", absent)
    figures.leave(BLOCK, PAGE, tmp_path, None, Console(width=200), {"sealed.json": "{}"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "replay.json", "sealed.json"]
    assert "no figures, matplotlib is not installed: pip install 'samebits[report]'" in capsys.readouterr().out
    assert "A title" in (tmp_path / "index.html").read_text()


def test_the_pictures_of_the_documentation_are_of_the_committed_records():
    """``samebits figures RECORD --only NAME --out docs/images/RECORD`` draws them again."""
    folders = sorted(path.parent for path in (ROOT / "docs" / "images").rglob(plots.CAPTIONS))
    assert folders
    pages = [ROOT / "README.md", ROOT / "src/samebits/models/minimax_h3/README.md"]
    shown = "".join(page.read_text() for page in pages)
    for folder in folders:
        record = load.replay(ROOT / "benchmarks" / "results" / f"{folder.name}.json")
        assert plots.digest(record) in (folder / plots.CAPTIONS).read_text(), (
            f"{folder} is of another record: draw it again"
        )
        for picture in folder.glob("*.png"):
            assert f"docs/images/{folder.name}/{picture.name})" in shown and picture.stat().st_size < 200_000
