"""The file: what is written is read, and what is not a whole trace is refused."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from drift.models import Net, batch

from samebits.verify.trace import TraceError, read, trace


@pytest.fixture
def recorded(tmp_path):
    model = Net(blocks=1)
    with trace(model, tmp_path / "run.trace", rows=True) as recording:
        model(batch()).sum().backward()
    return recording.trace, tmp_path / "run.trace"


def test_what_is_written_is_read(recorded):
    made, path = recorded
    found = read(path)
    assert found.events == made.events and found.header == made.header and found.stopped is None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[0]["format"], lines[0]["version"], lines[0]["digest"]) == ("samebits-trace", 1, "samebits-128-1")
    assert lines[-1]["events"] == len(lines) - 2 and lines[-1]["by_kind"]["parameter"] == 6
    assert lines[0]["environment"]["torch"] == metadata.version("torch")
    assert lines[0]["modules"]["blocks.0.norm"] == repr(Net(blocks=1).blocks[0].norm)


@pytest.mark.parametrize("text", ["import torch\n", "[1]\n", "{}\n"])
def test_another_file_is_no_trace(tmp_path, text):
    path = tmp_path / "run.py"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"run.py is no trace: its first line is not a samebits-trace header"):
        read(path)


def test_every_cut_is_noticed(recorded):
    _, path = recorded
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    for damaged in (
        *("", "".join(lines[:-1]), "".join(lines[:5]), lines[0], text[:-20]),
        "".join([*lines[:4], *lines[5:]]),
        "".join([*lines[:4], lines[4][:30] + "\n", *lines[5:]]),
    ):
        path.write_text(damaged)
        with pytest.raises(TraceError):
            read(path)


@pytest.mark.parametrize(
    ("line", "change", "word"),
    [
        (0, {"format": "other"}, "no trace"),
        (0, {"version": 2}, "version 2"),
        (3, {"kind": "import os"}, "line 4"),
        (3, {"phase": "sideways"}, "phase"),
        (3, {"surprise": 1}, "surprise"),
        (-1, {"tensor_files": ["../../etc/passwd"]}, "beside the trace"),
        (-1, {"events": 7}, "counts 7"),
    ],
)
def test_strange_content_is_refused(recorded, line, change, word):
    _, path = recorded
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | change)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=word):
        read(path)


def test_other_files_are_refused(tmp_path):
    for name, content in (
        ("a", b"\xff\xfe\x00"),
        ("b", b"[1, 2]\n"),
        ("c", b"hello\n"),
        ("d", b'{"kind": "header"}\n'),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError):
            read(tmp_path / name)
