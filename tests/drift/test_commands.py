"""The commands: what they print, write and return."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from samebits.cli import build
from samebits.verify.drift import batch_rows
from samebits.verify.trace import read

MODELS = """
import torch
from drift.models import Net, Nudged, batch
from torch import nn

def good(width="8"):
    return Net(int(width)), {"x": batch(4, int(width))}

def bad():
    model = Net()
    model.blocks[1].up = Nudged(model.blocks[1].up, 2)
    return model, batch()

def step():
    model = Net()
    return model, lambda: model(batch()).sum().backward()

def fails():
    return Net(), batch(4, 9)

def nothing():
    return 3

class Depends(nn.Module):
    def forward(self, x):
        return x - x.mean()

def depends():
    return nn.Sequential(nn.ReLU(), Depends()), batch()

if __name__ == "__main__":
    import sys
    model = Net()
    model(batch()).sum().backward()
    print("argument", sys.argv[1:])
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words):
    return CliRunner().invoke(build(words), [str(word) for word in words])


def test_trace_and_drift(folder):
    first = call("trace", "models.py:good", "--backward", "--out", "a.trace", "--rows", "1")
    assert first.exit_code == 0 and "18 calls, 12 parameters" in first.stdout
    assert call("trace", "models.py:bad", "--backward", "--out", "b.trace", "--rows", "1").exit_code == 0
    same = call("drift", "a.trace", "a.trace")
    assert same.exit_code == 0 and same.stdout.endswith("same bits\n")
    found = call("drift", "a.trace", "b.trace", "--json", "d.json", "--html", "d.html")
    assert found.exit_code == 1 and "FIRST DRIFT blocks.1.up" in found.stdout
    data = json.loads((folder / "d.json").read_text())
    assert data["first"]["forward"]["path"] == "blocks.1.up" and data["exit_code"] == 1
    assert data["first"]["forward"]["outputs"][0]["rows"] == [[2, 2]]
    page = (folder / "d.html").read_text()
    assert page.count("FIRST DRIFT: ") == 1 and "blocks.1.up" in page
    assert page.count("FIRST DIFFERENCE: ") == 1  # of the backward, which is not blamed for its forward
    assert not re.findall(r"https?://|<script|<link|@import|url\(", page)
    batch_rows(4, 4, [(0, 0), (1, 1)]).write("rows.json")
    assert call("drift", "a.trace", "b.trace", "--rows", "rows.json").exit_code == 0  # the fault is in row 2


def test_page_escapes_what_a_trace_says(folder):
    call("trace", "models.py:good", "--out", "a.trace")
    text = (folder / "a.trace").read_text()
    (folder / "b.trace").write_text(text.replace('"Block"', '"<script>alert(1)</script>"'))
    call("drift", "b.trace", "a.trace", "--html", "d.html")
    assert "<script" not in (folder / "d.html").read_text()


def test_a_callable_may_run_its_own_step_and_take_arguments(folder):
    assert call("trace", "models.py:step", "--out", "s.trace", "--no-reuse").exit_code == 0
    assert not read("s.trace").header["options"]["reuse"]
    assert {e.phase for e in read("s.trace").events} == {"forward", "backward"}
    assert call("trace", "models.py:good", "--out", "w.trace", "--", "16").exit_code == 0
    assert read("w.trace").phase("forward")[-1].inputs[0].shape == (4, 16)
    assert (
        call("trace", "models.py:good", "--module", "blocks.0", "--tensors", "blocks.0", "--out", "p.trace").exit_code
        == 0
    )
    assert [e.path for e in read("p.trace").phase("forward")] == ["blocks.0", "(model)"]
    assert (folder / "p.trace.0.safetensors").is_file()


def test_a_script_is_run_as_a_program(folder, capfd):
    ended = call("trace", "models.py", "--out", "s.trace", "--", "0", "more")
    assert ended.exit_code == 0 and "argument ['0', 'more']" in ended.stdout
    found = read("s.trace")
    assert [e.path for e in found.phase("forward")][-1] == "(model)" and found.phase("backward")
    failed = call("trace", "models.py", "--out", "f.trace", "--", "3")
    assert failed.exit_code == 1 and "SystemExit" in failed.stderr
    assert read("f.trace").stopped["error"] == "SystemExit"


def test_a_run_that_fails_leaves_a_trace_that_says_where(folder):
    failed = call("trace", "models.py:fails", "--out", "f.trace")
    assert failed.exit_code == 1 and "ended in blocks.0.norm by RuntimeError" in failed.stderr
    assert read("f.trace").stopped["path"] == "blocks.0.norm"


def test_invariance(folder):
    bad = call("invariance", "models.py:depends", "--json", "i.json")
    assert bad.exit_code == 1 and "first in forward: 1 (Depends)" in bad.stdout
    data = json.loads((folder / "i.json").read_text())
    status = {(f["change"], f["status"]) for f in data["findings"] if f["change"] != "permute"}
    assert status == {("repeat", "pass"), ("split", "fail"), ("pad", "fail")}  # a mean may survive a permutation
    assert data["exit_code"] == 1 and all(f["first"]["path"] == "1" for f in data["findings"] if f["first"])
    assert call("invariance", "models.py:depends", "--only", "repeat").exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("drift", "no.trace", "no.trace"),
        ("drift", "models.py", "models.py"),
        ("trace", "no.py"),
        ("trace", "models.py:nothing"),
        ("trace", "models.py:missing"),
        ("trace", "models.py:good", "--out", "no/folder/run.trace"),
        ("trace", "models.py", "--backward"),
        ("trace", "models.py:good", "--rows", "-1"),
        ("invariance", "models.py:step"),
        ("invariance", "models.py:fails"),
        ("invariance", "models.py:depends", "--json", "no/folder/i.json"),
        ("invariance", "models.py:depends", "--only", "luck"),
        ("invariance", "models.py:depends", "--batch-axis", "5"),
        ("invariance", "models.py:depends", "--only", "pad_sequence"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(folder, words):
    ended = call(*words)
    assert ended.exit_code == 2 and ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
