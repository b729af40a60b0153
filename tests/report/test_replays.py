"""Pages and terminal tables of a replay, from its JSON."""

from __future__ import annotations

import copy
import io
import re

import pytest
from jinja2 import UndefinedError
from rich.console import Console

from samebits.report import figures, pages, replays
from samebits.report.parts import Cell, Group, Table, Tile
from samebits.report.terminal import rich_table

SAME = {"same": True, "differing": 0, "elements": 8, "max_abs": None, "max_ulp": None, "first": ""}
ERROR = {"max_abs": 0.5, "relative": 0.25, "used": 0.1, "correctly_rounded": 0.5}
STAGE = {
    "name": "timestep_mlp",
    "owner": "samebits:timestep_mlp",
    "contract": "lanes32",
    "launches": ["timestep_mlp lanes32 cuda"],
    "stand_in": False,
    "promised": True,
    "digest": "0" * 64,
    "repeat": True,
    "peer_repeat": True,
    "rows": {"checked": 3, "varying": 0, "first": None},
    "peer_rows": {"checked": 3, "varying": 2, "first": 1},
    "chained": SAME,
    "isolated": SAME,
    "error": ERROR,
    "peer_error": ERROR,
    "within_tolerance": True,
}
MODE = {"repeat": True, "max_abs": 0.1, "relative": 0.01, "correctly_rounded": 1.0}
LEAF = {
    "name": "transformer_blocks.0.adaln_proj.linear.bias",
    "dtype": "bfloat16",
    "golden_absmax": 2.0,
    "modes": {"separate": MODE, "fused": MODE, "peer": MODE | {"repeat": False}},
}
CASE = {
    "title": "T = 3, S = 5",
    "controls": [],
    "layout": "block",
    "seed": 4,
    "first_drift": None,
    "first_isolated_drift": None,
    "stages": [STAGE],
    "gradients": {"leaves": [LEAF], "owners": {}, "stand_ins": []},
}
REPLAY = {
    "model": "minimax-h3",
    "stage": "conditioning",
    "geometry": "hidden_size 16",
    "weights": "synthetic, seed 0",
    "peer": "diffusers <0.42.1>",
    "device": "cpu",
    "environment": {"torch": "2.13", "triton": "none"},
    "candidate": {"timestep_mlp": "samebits:timestep_mlp"},
    "cases": [CASE],
    "checks": [{"name": "every stage repeats", "judged": 1, "passed": True, "detail": ""}],
}


def changed(**stage):
    made = copy.deepcopy(REPLAY)
    made["cases"][0]["stages"][0].update(stage)
    return made


def row(replay):
    (table, _) = replays.case_tables(replay["cases"][0])
    return dict(zip(table.columns[:8], table.rows[0][:8], strict=True))


def titles(replay):
    return [table.title for table in replays.summary(replay)]


def test_verdicts_are_those_of_the_record():
    cells = row(REPLAY)
    assert cells["repeats"].state == cells["rows that vary"].state == cells["isolated, differing"].state == "good"
    assert cells["peer's rows that vary"] == Cell("2 of 3", "none", "first: row 1")
    assert row(changed(repeat=False))["repeats"].state == "bad"
    assert row(changed(rows={"checked": 3, "varying": 1, "first": 0}))["rows that vary"].state == "bad"
    alone = {"checked": 300, "varying": 8, "first": 0, "alone": 8, "alone_varying": 8}
    assert row(changed(rows=alone))["rows that vary"].text == "8 of 300; 8 of 8 alone"
    off = SAME | {"same": False, "differing": 2, "max_ulp": 7, "first": "element 0"}
    assert row(changed(isolated=off))["isolated, differing"] == Cell("2 of 8", "bad", "element 0")
    assert row(changed(isolated=off, promised=False))["isolated, differing"].state == "open"
    far = replays.case_tables(changed(within_tolerance=False)["cases"][0])[0].rows[0]
    assert [cell.state for cell in far if cell.text == "0.25"] == ["bad", "open"]


def test_a_stand_in_has_no_verdict():
    cells = row(changed(stand_in=True, repeat=False, rows={"checked": 3, "varying": 1, "first": 0}))
    assert "(stand-in)" in cells["stage"].text
    assert {cell.state for cell in cells.values()} <= {"none", "open", "good"}
    assert cells["repeats"].state == "none"


def test_a_result_without_a_number_says_so():
    tables = replays.case_tables(changed(error=ERROR | {"relative": None}, within_tolerance=False)["cases"][0])
    assert Cell("not finite", "bad") in tables[0].rows[0]


def test_where_the_peer_varies_with_itself():
    assert "Where the peer varies with itself" in titles(REPLAY)
    calm = changed(peer_rows={"checked": 3, "varying": 0, "first": None})
    assert "Where the peer varies with itself" in titles(calm)  # its gradient does not repeat
    calm["cases"][0]["gradients"]["leaves"][0]["modes"]["peer"]["repeat"] = True
    assert "Where the peer varies with itself" not in titles(calm)


def test_the_page_is_whole_and_escaped():
    text = pages.tables_page(replays.page(REPLAY))
    assert "diffusers &lt;0.42.1&gt;" in text and "<0.42.1>" not in text
    shown = (
        "1 of 1 hold",
        "Gradients, T = 3, S = 5",
        "adaln_proj.linear.bias",
        "block layout, seed 4",
        "samebits:timestep_mlp",
    )
    for part in shown:
        assert part in text
    assert "<style>" in text and "src=" not in text and "@import" not in text


def test_tiles_and_verdicts_follow_the_checks():
    bad, silent = copy.deepcopy(REPLAY), copy.deepcopy(REPLAY)
    bad["checks"][0]["passed"] = False
    silent["checks"][0]["judged"] = 0
    silent["cases"][0]["stages"][0]["stand_in"] = True
    found = [replays.page(replay) for replay in (REPLAY, bad, silent)]
    assert [page.tiles[0].state for page in found] == ["good", "bad", "none"]
    assert [page.tables[0].rows[0][1].text for page in found] == ["holds", "broken", "not judged"]
    assert found[2].tiles[0].detail == "cases: 1; stages with a stand-in: 1"


def test_the_figure_shows_what_the_table_says():
    svg = figures.node_figure(REPLAY["cases"][0]).svg
    assert svg.count('class="chip good"') == 2 and "chip bad" not in svg and "timestep_mlp" in svg
    assert svg.count("<circle") == 2 and 'class="ours"' in svg and 'class="peer"' in svg
    off = SAME | {"same": False, "differing": 2}
    for change, state in (({"isolated": off}, "bad"), ({"isolated": off, "promised": False}, "none")):
        assert f'class="chip {state}"' in figures.node_figure(changed(**change)["cases"][0]).svg
    varying = changed(rows={"checked": 3, "varying": 1, "first": 0})["cases"][0]
    assert 'class="chip bad"' in figures.node_figure(varying).svg
    assert figures.node_figure(changed(error=ERROR | {"relative": None})["cases"][0]).svg.count("<circle") == 1
    assert "<b>" not in figures.node_figure(changed(name="<b>")["cases"][0]).svg


TIMED = {"ours": 30.0, "peer": 60.0, "calls": 15, "how": "CUDA-graph <replays>"}


def test_latencies_are_drawn_where_the_record_has_them():
    assert len(replays.group(REPLAY["cases"][0]).figures) == 1 and "Latency" not in pages.tables_page(
        replays.page(REPLAY)
    )
    case = changed(latency_us=TIMED)["cases"][0]
    _, figure = replays.group(case).figures
    bars = re.findall(r'width="([\d.]+)" height="6" class="(ours|peer)"', figure.svg)
    assert bars == [("150.0", "ours"), ("300.0", "peer")] and "30.0 / 60.0" in figure.svg
    assert "medians of CUDA-graph <replays>; " in figure.caption and "block_bench" in figure.caption
    table = replays.case_tables(case)[0]
    assert table.columns[-2:] == ("us", "peer's") and table.rows[0][-1] == Cell("60.0")
    assert table.rows[0][-2] == Cell("30.0", detail="CUDA-graph <replays>, median of 15")
    text = pages.tables_page(replays.page(changed(latency_us=TIMED)))
    assert 'aria-label="Latency, T = 3, S = 5' in text and "CUDA-graph &lt;replays&gt;" in text


def test_a_latency_that_could_not_be_measured_has_no_bar():
    case = changed(latency_us=TIMED | {"ours": None})["cases"][0]
    svg = figures.latency_figure(case).svg
    assert 'class="ours"' not in svg and svg.count('class="peer"') == 1 and "- / 60.0" in svg
    assert replays.case_tables(case)[0].rows[0][-2].text == "-"
    none = changed(latency_us=TIMED | {"ours": None, "peer": None})["cases"][0]
    assert "<rect" not in figures.latency_figure(none).svg


def test_a_template_may_use_nothing_that_it_was_not_given():
    with pytest.raises(UndefinedError):
        pages.render("tables.html.j2")


def test_any_page_of_tables():
    table = Table("A <table>", ("one", "two"), ((Cell("x & y", "good"), Cell("3")),), numeric=frozenset({1}))
    page = pages.TablesPage(
        "Title", "Lead", {}, [Tile("t", "v", "d", "bad", "tables")], [table], [Group("g", "c", (table,))]
    )
    text = pages.tables_page(page)
    assert text.count("A &lt;table&gt;") == 2 and "x &amp; y" in text and 'class="tile bad"' in text


def test_the_terminal_shows_the_same_table():
    table = Table("[b]", ("one", "two"), ((Cell("[x]", "bad"), Cell("3")),), numeric=frozenset({1}))
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(rich_table(table))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines == [["[b]"], ["one", "two"], ["[x]", "3"]]
