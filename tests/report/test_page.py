"""The page: every section is there, run or not, and what failed is as visible as what passed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from samebits import verify
from samebits.report import charts, load, view, write

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


MODEL = {
    "title": "decoder layer", "transformers": "5", "torch": "2", "device": "cpu", "contracts": {"h_aggregate": "tree256"},
    "chained": [_difference("attn_hc.post", 0), _difference("attn_hc.collapsed", 2), _difference("layer", 4)],
    "isolated": [_difference("attn_hc.collapsed", 2)], "first": _difference("attn_hc.collapsed", 2), "passed": True,
    "checks": [{"name": "the unpatched bits are back", "passed": True, "detail": ""}],
    "findings": [{"question": "dtype?", "answer": "float32"}],
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
    recorded = load.Recorded((check.to_json(),), AUDIT, (MODEL,), (_line(), _line(shape={"T": 1, "D": 4096}, us=4.0)))
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
