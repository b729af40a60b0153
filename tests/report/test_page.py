"""The page: every section is there, run or not, and what failed is as visible as what passed."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from samebits import verify
from samebits.report import charts, checks, load, models, view, write

STAMP = {"gpu": "not installed", "torch": "2.0", "commit": "abc"}
VOID = {"meta", "img", "br", "input"}


class Structure(HTMLParser):
    """Every tag closed in order; collects ids, tables and what the page would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        address = found.get("src") or found.get("href") or ""
        if not address.startswith(("#", "data:")) and address:
            self.outside.append(address)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _line(**changes):
    base = {
        "op": "h_aggregate", "contract": "ascending", "backend": "cuda", "direction": "fwd", "shape": {"T": 8192, "D": 4096},
        "dtype": "bfloat16", "us": 84.0, "us_min": 83.0, "us_max": 90.0, "gbps": 4000.0, "copy_fraction": 0.95, "tflops": None,
        "peers": {"pytorch eager": {"us": 400.0, "ratio": 4.76}}, "bits_checked": True, "extra_bytes": 0, "gpu": "GPU",
        "driver": "1", "torch": "2", "triton": "3", "nvrtc": "13", "commit": "c" * 40, "bits": "12 rows", "bytes": 335_675_392,
        "output_bytes": 67_108_864, "copy_gbps": 4200.0, "launch_floor_us": 2.8, "host_us": 9.0, "plan": "p", "peers_skipped": {},
    }  # fmt: skip
    return base | changes


AUDIT = {
    "clean": False,
    "compilers": {"nvrtc": "13.0"},
    "reports": [
        {"op": "h_aggregate", "backend": "cuda", "kernel": "forward[VEC=8]", "arch": "sm_90a", "contracts": ["ascending"],
         "verdict": "clean", "resources": {"registers": 40}, "opcodes": {}, "findings": []},
        {"op": "h_aggregate", "backend": "cuda", "kernel": "backward", "arch": "sm_90a", "contracts": ["ascending"],
         "verdict": "findings", "resources": None, "opcodes": {},
         "findings": [{"rule": "contraction", "instruction": "FFMA", "why": "fused", "remedy": "forbid"}]},
    ],
}  # fmt: skip


def _difference(name, differing):
    found = (
        {"max_abs": 0.5, "max_ulp": 1, "first": (0, 3), "ours_bits": "0x3f80", "theirs_bits": "0x3f81"}
        if differing
        else {}
    )
    return {"name": name, "shape": (1, 4), "dtype": "bfloat16", "elements": 4, "differing": differing, **found}


def _row(boundary, patched, given, varying):
    return {
        "module": "attn_hc",
        "boundary": boundary,
        "patched": patched,
        "given": given,
        "rows": 8,
        "varying": varying,
    }


MODEL = {
    "title": "decoder layer", "transformers": "5", "torch": "2", "device": "cpu", "contracts": {"h_aggregate": "tree256"},
    "chained": [_difference("attn_hc.post", 0), _difference("attn_hc.collapsed", 2), _difference("layer", 4)],
    "isolated": [_difference("attn_hc.collapsed", 2)], "first": _difference("attn_hc.collapsed", 2), "passed": True,
    "checks": [{"name": "the unpatched bits are back", "passed": True, "detail": ""}],
    "findings": [{"question": "dtype?", "answer": "float32"}],
    "causes": [{"module": "attn_hc.collapsed", "elements": 4, "unexplained": 1,
                "steps": [{"habit": "adds <in order>", "moved": 2}, {"habit": "rounds early", "moved": 0}]}],
    "rows": [_row("collapsed", True, "its streams", 7), _row("collapsed", False, "its streams", 5),
             _row("post", True, "its streams", 0)],
    "sites": {"attn_hc": 1, "ffn_hc": 0},
    "split": [_difference("ours: layer", 0), _difference("theirs: attn_hc.comb", 2)],
}  # fmt: skip


def test_empty_page_says_what_was_not_run():
    text = write.render(load.Recorded(), STAMP)
    page = Structure(text)
    assert page.ids == ["checks", "audit", "models", "bench"]
    for command in view.COMMANDS.values():
        assert text.count(command.replace("&", "&amp;")) >= 2  # in its section and on its tile
    assert text.count("not run") >= 8
    assert page.outside == []


def test_full_page():
    check = verify.check(
        "h_aggregate", backend="reference", device="cpu", rows=5, sizes={"D": 64}, only=["batch", "accuracy"]
    )
    recorded = load.Recorded(
        (check.to_json(),), None, AUDIT, (MODEL,), (_line(), _line(shape={"T": 1, "D": 4096}, us=4.0))
    )
    text = write.render(recorded, STAMP)
    page = Structure(text)
    assert page.ids == ["checks", "audit", "models", "bench"]
    assert page.outside == []
    assert page.count["img"] == 1
    assert "first differing boundary: attn_hc.collapsed" in text
    assert "contraction" in text and "FFMA" in text
    assert "forward accuracy" in text and "gradient invariance" in text
    assert text.count('<span class="mark">not run</span>') == 0
    assert "0x3f80" in text and "0x3f81" in text
    for word in ("met", "verified", "same bits", "pass"):
        assert f'<span class="mark">{word}</span>' in text, word


def test_failures_are_shown_in_full():
    """A planted fault must reach the page with its place and the command that repeats it."""
    check = verify.check("torch.nn.functional.rms_norm", device="cpu", rows=5, only=["batch", "accuracy"]).to_json()
    broken = json.loads(json.dumps(check))
    broken["passed"] = False
    broken["checks"][0] |= {
        "status": "fail",
        "failures": [
            {"result": "y", "label": "batch size 1 vs 5", "what": "row 0: <0x1> & 0x2", "reproduce": "samebits check x"}
        ],
    }
    text = write.render(load.Recorded(checks=(broken,)), STAMP)
    assert "row 0: &lt;0x1&gt; &amp; 0x2; reproduce: samebits check x" in text
    assert '<span class="mark">fail</span>' in text
    assert "0 of 1" in text


def test_unverified_bits_and_skips_are_shown():
    skipped = {
        "op": "h_aggregate",
        "direction": "fwd",
        "shape": {"T": 9, "D": 7168},
        "dtype": "bfloat16",
        "skipped": "needs 200 GB",
    }
    lines = (
        _line(bits_checked=False, bits="hidden differs: row 0"),
        skipped,
        _line(peers_skipped={"torch.compile": "out of memory"}),
    )
    text = write.render(load.Recorded(bench=lines), STAMP)
    for words in (
        "NOT verified",
        "hidden differs: row 0",
        "needs 200 GB",
        "out of memory",
        "bits verified in 1 of 2 rows",
    ):
        assert words in text
    assert "no measured row" in text  # targets that nothing speaks about


def test_charts_are_reproducible_and_hold_every_line():
    lines = [
        _line(shape={"T": t, "D": 4096}, direction=d, us=5.0 + t / 90) for t in (1, 128, 8192) for d in ("fwd", "bwd")
    ]
    (one,), (two,) = charts.speed(lines), charts.speed(lines)
    assert one == two
    assert "D=4096" in one.title
    assert charts.speed([]) == ()


def test_missing_matplotlib_is_said(monkeypatch):
    def absent(lines):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(charts, "speed", absent)
    assert "No charts: the module &#39;matplotlib&#39; is not installed" in write.render(
        load.Recorded(bench=(_line(),)), STAMP
    )


def test_files_are_read_and_foreign_ones_refused(tmp_path: Path):
    good = tmp_path / "model.json"
    good.write_text(json.dumps([MODEL, MODEL]))
    recorded = load.load([], None, [good], [])
    assert recorded.models is not None and len(recorded.models) == 2 and recorded.checks is None
    bad = tmp_path / "bad.json"
    for content, message in (
        ("[]", "holds no check result"),
        ("{}", "not a check result, it lacks 'candidate'"),
        ("{", "not JSON"),
    ):
        bad.write_text(content)
        with pytest.raises(ValueError, match=re.escape(f"{bad}: ") + message):
            load.load([bad], None, [], [])


def test_command_writes_the_page(tmp_path: Path):
    from typer.testing import CliRunner

    from samebits import cli

    lines = tmp_path / "x.jsonl"
    lines.write_text(json.dumps(_line()) + "\n")
    words = ["report", "--bench", str(lines), "--out", str(tmp_path / "r")]
    result = CliRunner().invoke(cli.build(words), words)
    assert result.exit_code == 0, result.output
    Structure((tmp_path / "r" / "index.html").read_text())


def _texts(table):
    return [tuple(cell.text for cell in row) for row in table.rows]


def _model_tables(**changes):
    return {table.title: table for table in models.group(MODEL | changes).tables}


def test_first_difference_leads_the_models():
    table = models.overview((MODEL, MODEL | {"first": None, "title": "same"}))
    shown = _texts(table)
    assert shown[0][:4] == ("decoder layer", "attn_hc.collapsed", "2", "4")
    assert shown[0][-2:] == ("4 of 4", "1 hold")
    assert shown[1][1] == "none"
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_causes_end_with_what_they_leave():
    table = _model_tables()["Why they differ"]
    assert _texts(table) == [
        ("attn_hc.collapsed", "adds <in order>", "2", "4", ""),
        ("attn_hc.collapsed", "rounds early", "0", "4", "1"),
    ]
    assert table.rows[-1][-1].state == "none"  # something is left, which is not nothing
    explained = _model_tables(causes=[MODEL["causes"][0] | {"unexplained": 0}])["Why they differ"]
    assert explained.rows[-1][-1].state == "good"


def test_rows_show_both_models_and_judge_only_ours():
    table = _model_tables()["Does a row vary with the batch?"]
    assert _texts(table) == [
        ("attn_hc.collapsed", "its streams", "7 of 8", "5 of 8"),
        ("attn_hc.post", "its streams", "0 of 8", "-"),
    ]
    assert [row[2].state for row in table.rows] == ["bad", "good"]
    assert {row[3].state for row in table.rows} == {"open"}


def test_sites_that_were_not_passed_once_are_marked():
    table = _model_tables()["Call sites"]
    assert _texts(table) == [("attn_hc", "1"), ("ffn_hc", "0")]
    assert [row[1].state for row in table.rows] == ["good", "bad"]


def test_split_shows_where_each_model_leaves_itself():
    table = _model_tables()["One sequence alone and in the batch"]
    assert [row[:3] for row in _texts(table)] == [
        ("with our operators", "none: same bits everywhere", ""),
        ("the class", "attn_hc.comb", "2"),
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert "One sequence alone and in the batch" not in _model_tables(split=[])


def test_every_model_table_reaches_the_page():
    text = write.render(load.Recorded(models=(MODEL, MODEL)), STAMP)
    Structure(text)
    for title in (*_model_tables(), "Where they first differ", "adds &lt;in order&gt;"):
        assert title in text, title
    assert text.count('<details class="group" open>') == 1  # the first; the others are folded


def test_broken_claims_have_their_detail():
    claims = [{"name": "a", "passed": True, "detail": ""}, {"name": "b", "passed": False, "detail": "attn_hc"}]
    table = _model_tables(checks=claims)["What must hold"]
    assert _texts(table) == [("a", "holds", ""), ("b", "broken", "attn_hc")]
    assert models.overview((MODEL | {"checks": claims},)).rows[0][-1].text == "1 broken"


def _failed_check():
    check = verify.check("torch.nn.functional.rms_norm", device="cpu", rows=5, only=["batch", "accuracy"]).to_json()
    broken = json.loads(json.dumps(check))
    broken["passed"] = False
    entry = {"result": "y", "label": "batch size 1 vs 5", "what": "row 0: 0x1", "reproduce": "again", "also": 2}
    broken["checks"][1] |= {"name": "forward_invariance", "status": "fail", "failures": [entry]}
    return broken


def test_example_of_a_failure_counts_nowhere():
    example = _failed_check()
    passing = json.loads(json.dumps(example)) | {"passed": True, "candidate": "ours"}
    passing["checks"][1] |= {"status": "pass", "failures": []}
    recorded = load.Recorded(checks=(passing,), example=example)
    text = write.render(recorded, STAMP)
    assert Structure(text).ids == ["checks", "failure", "audit", "models", "bench"]
    assert "1 of 1" in text and "tile bad" not in text
    section = text[text.index('id="failure"') : text.index('id="audit"')]
    for words in ("batch size 1 vs 5 (and 2 more alike)", "row 0: 0x1", "again", '<span class="mark">fail</span>'):
        assert words in section, words
    assert "whose rows depend on what else is in the batch" in section


def test_example_that_holds_here_says_so():
    example = _failed_check()
    example["checks"][1] |= {"status": "pass", "failures": []}
    assert len(checks.failing_example(example)) == 1
    assert "its bits did not vary, which proves nothing" in write.render(load.Recorded(example=example), STAMP)


def test_speed_of_another_run_says_so():
    lines = (_line(), _line(commit="d" * 40, shape={"T": 1, "D": 4096}, us=4.0))
    here = view.page(load.Recorded(bench=lines), STAMP)
    there = view.page(load.Recorded(bench=lines, bench_note="Recorded elsewhere."), STAMP)
    assert "not by this run" in there.tiles[-1].detail and "not by this run" not in here.tiles[-1].detail
    text = write.render(load.Recorded(bench=lines, bench_note="Recorded elsewhere."), STAMP)
    assert '<p class="recorded">Recorded elsewhere.</p>' in text
    stamps = there.bench[0]
    assert stamps.title == "Where it was measured"
    assert [row[-1] for row in _texts(stamps)] == ["1", "1"]
    assert all(digit * 40 in text for digit in "cd")


def test_header_is_short_and_right():
    shown = view.page(
        load.Recorded(), {"gpu": "not installed", "triton": "not installed", "commit": "a" * 40 + "+dirty"}
    )
    assert shown.environment == {"gpu": "none", "triton": "not installed", "commit": "a" * 12 + "+dirty"}


def test_changed_machine_code_is_no_good_audit():
    clean = AUDIT | {"clean": True, "reports": AUDIT["reports"][:1]}
    tile = view.page(load.Recorded(audit=clean | {"lock": {"status": "same", "lines": []}}), STAMP).tiles[1]
    assert (tile.value, tile.state) == ("0 findings", "good")
    changed = load.Recorded(audit=clean | {"lock": {"status": "changed", "lines": ["removed: k"]}})
    tile = view.page(changed, STAMP).tiles[1]
    assert (tile.value, tile.state) == ("differs from lock", "bad")
    assert "removed: k" in write.render(changed, STAMP)


def _demo_run(tmp_path):
    from rich.console import Console

    from samebits.cli import demo

    return demo, demo._Run(tmp_path, Console(quiet=True))


def test_demo_reads_committed_times_and_no_folder_below(tmp_path: Path, monkeypatch):
    from samebits import environment

    demo, run = _demo_run(tmp_path)
    monkeypatch.setattr(environment, "checkout", lambda: tmp_path)
    assert demo._recorded_speed(run) == (None, "") and run.lines == []
    folder = tmp_path / demo.RESULTS
    (folder / "two_gpu_host").mkdir(parents=True)
    (folder / "two_gpu_host" / "h.jsonl").write_text("not JSON")
    (folder / "check_sm_90.json").write_text("not lines")
    (folder / "h_aggregate.jsonl").write_text(json.dumps(_line()) + "\n")
    lines, note = demo._recorded_speed(run)
    assert lines == (_line(),)
    assert "benchmarks/results/h_aggregate.jsonl" in note and "This run measured no time" in note
    assert "two_gpu_host" not in note and "committed" not in note  # no git here
    ((passed, said),) = run.lines
    assert passed is None and "recorded on GPU at commit cccccccccccc" in said

    (folder / "bad.jsonl").write_text("{}\n")
    assert demo._recorded_speed(run) == (None, "")
    assert run.lines[-1][0] is False and "bad.jsonl, line 1" in run.lines[-1][1]
    monkeypatch.setattr(environment, "checkout", lambda: None)
    assert demo._recorded_speed(run) == (None, "")


def test_demo_dates_committed_times(tmp_path: Path):
    demo, _ = _demo_run(tmp_path)
    path = tmp_path / "x.jsonl"
    path.write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x", "--date", "2001-02-03T04:05:06+00:00"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert re.fullmatch(r" \(committed \d{4}-\d\d-\d\d\)", demo._committed(tmp_path, path))
    assert demo._committed(tmp_path, tmp_path / "never.jsonl") == ""


def test_example_file_is_read(tmp_path: Path):
    path = tmp_path / "example.json"
    path.write_text(json.dumps(_failed_check()))
    recorded = load.load([], None, [], [], path)
    assert recorded.checks is None and dataclasses.asdict(recorded)["example"]["passed"] is False
