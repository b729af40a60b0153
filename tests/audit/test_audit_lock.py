"""The lock says what changed, and says so differently where only the compilers did."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from samebits.audit import lock
from samebits.audit.code import Resources
from samebits.audit.rules import Finding
from samebits.audit.run import Report, Result

VERSIONS = (("nvrtc", "13.0.88"), ("triton", "3.6.0"))


def report(op: str = "norm", label: str = "forward", arch: str = "sm_80", **changes: object) -> Report:
    made = Report(
        label, arch, ("ptx", "sass"), (), op, "cuda", ("c",), Resources(32, 0, 128, 0), (("FADD", 7), ("FMUL", 8)), "f1"
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    reports = (report(), report(arch="sm_90a"), report(op="sum"), report(op="sum", arch="sm_90a"))
    lock.write(tmp_path / "audit.lock.json", Result(reports, VERSIONS))
    return tmp_path / "audit.lock.json"


ARCHES = ("sm_80", "sm_90")


def test_the_same_code_compares_the_same(path: Path) -> None:
    assert lock.compare(path, Result((report(), report(arch="sm_90a")), VERSIONS), ["norm"], ARCHES).status == "same"


def test_one_line_per_kernel_and_architecture(path: Path) -> None:
    text = path.read_text()
    assert len([line for line in text.splitlines() if "opcodes" in line]) == 4
    kept = json.loads(text)["kernels"]["norm/cuda/forward sm_80"]
    assert kept == {"fingerprint": "f1", "registers": 32, "stack": 0, "shared": 128, "opcodes": "FADD:7 FMUL:8"}


def test_every_kind_of_change_is_named(path: Path) -> None:
    now = (
        report(opcodes=(("FADD", 6), ("FFMA", 1), ("FMUL", 8)), resources=Resources(40, 0, 128, 0)),
        report(label="backward"),
    )
    comparison = lock.compare(path, Result(now, VERSIONS), ["norm"], ARCHES)
    assert comparison.status == "changed"
    assert comparison.lines == (
        "added: norm/cuda/backward sm_80",
        "changed: norm/cuda/forward sm_80: registers 32 -> 40, FADD 7 -> 6, FFMA 0 -> 1",
        "removed: norm/cuda/forward sm_90a",
    )


def test_other_compilers_are_the_explanation(path: Path) -> None:
    now = Result((report(opcodes=(("FADD", 9),)),), (("nvrtc", "13.1.0"), ("triton", "3.6.0")))
    comparison = lock.compare(path, now, ["norm"], ["sm_80"])
    assert comparison.status == "compiler"
    assert "nvrtc 13.0.88 in the lock, 13.1.0 here" in comparison.lines[0]
    assert len(comparison.lines) == 2


def test_the_same_code_of_another_source_is_said(path: Path) -> None:
    now = Result((report(fingerprint="f2"), report(arch="sm_90a")), VERSIONS)
    assert lock.compare(path, now, ["norm"], ARCHES).lines == (
        "changed: norm/cuda/forward sm_80: source, options or contract, with the same code",
    )


def test_of_a_sample_only_what_is_in_it_is_compared(path: Path) -> None:
    good, bad = report(), report(arch="sm_90a", opcodes=(("FADD", 8), ("FMUL", 8)))
    assert lock.compare(path, Result((good,), VERSIONS), None, ARCHES, sample=True).status == "same"
    comparison = lock.compare(path, Result((good, bad), VERSIONS), None, ARCHES, sample=True)
    assert comparison.lines == ("changed: norm/cuda/forward sm_90a: FADD 7 -> 8",)


def test_a_lock_of_what_could_not_be_listed_is_not_written(tmp_path: Path) -> None:
    unlisted = report(arch="", findings=(Finding("unreadable", "error", "", "file", 1, ("why",)),))
    with pytest.raises(ValueError, match="incomplete"):
        lock.write(tmp_path / "x.json", Result((unlisted,), VERSIONS))
    assert not (tmp_path / "x.json").exists()


def test_what_has_findings_is_left_out(tmp_path: Path) -> None:
    unread = report(label="b", findings=(Finding("unreadable", "error", "", "file", 1, ("why",)),))
    fused = report(label="c", findings=(Finding("contraction", "fail", "c", "ptx", 1, ("fma",)),))
    refused = lock.write(tmp_path / "x.json", Result((report(), unread, fused), VERSIONS))
    assert refused == ("norm/cuda/b sm_80", "norm/cuda/c sm_80")
    assert list(json.loads((tmp_path / "x.json").read_text())["kernels"]) == ["norm/cuda/forward sm_80"]


def test_an_unread_kernel_is_a_difference(path: Path) -> None:
    unread = report(findings=(Finding("unreadable", "error", "", "file", 1, ("why",)),))
    assert lock.compare(path, Result((unread,), VERSIONS), ["norm"], ["sm_80"]).lines == (
        "unreadable: norm/cuda/forward sm_80",
    )


@pytest.mark.parametrize("content", [None, "{", '{"format": 99}'], ids=["missing", "broken", "future"])
def test_a_lock_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="lock"):
        lock.compare(tmp_path / "x.json", Result((), VERSIONS), None, ARCHES)
