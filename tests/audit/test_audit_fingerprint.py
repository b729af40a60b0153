"""A fingerprint changes with everything that the code or the verdict follows from, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from audit import planted_triton

import samebits
from samebits.audit import fingerprint as fingerprints
from samebits.audit import listing, lock, run, sample
from samebits.audit.build import Build
from samebits.audit.compile import ARCHES
from samebits.audit.fingerprint import fingerprint, without_comments
from samebits.audit.limits import STRICT, Limits
from samebits.audit.listing import Job
from samebits.runtime import nvrtc, triton_build
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.triton_build import TritonKernel

SOURCE = '#include "first.cuh"\nextern "C" __global__ void k(float* a) { a[0] = f(a[1]); }\n'
HEADERS = {
    "first.cuh": '#pragma once\n#include "second.cuh"\n',
    "second.cuh": "__device__ inline float f(float x) { return x + 1.0f; }\n",
    "third.cuh": "// not included\n",
}
Change = Callable[[str, str], None]


def job(**changes: object) -> Job:
    return replace(Job("h_aggregate", Build(CudaKernel("h_aggregate", "k"), ("ascending",)), STRICT), **changes)  # type: ignore[arg-type]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Change:
    """``change(file, text)``: file ``k.cu`` or a header now has that text."""
    texts = {"k.cu": SOURCE, **HEADERS}
    monkeypatch.setattr(nvrtc, "source_text", lambda kernel: texts["k.cu"])
    monkeypatch.setattr(nvrtc, "headers", lambda op: {n: t for n, t in texts.items() if n != "k.cu"})
    return texts.__setitem__


@pytest.mark.parametrize(
    ("file", "text", "counts"),
    [
        ("k.cu", SOURCE.replace("a[1]", "a[2]"), True),
        ("first.cuh", HEADERS["first.cuh"] + "#define NEW 1\n", True),
        ("second.cuh", HEADERS["second.cuh"].replace("1.0f", "2.0f"), True),
        ("third.cuh", "#error not included\n", False),
        ("fourth.cuh", "// nor this\n", False),
        ("second.cuh", "/* said\n twice */\n\n" + HEADERS["second.cuh"] + "  // it's 1\n", False),
    ],
    ids=["source", "header", "header of a header", "other header", "new header", "comment"],
)
def test_source_and_included_headers_count(change: Change, file: str, text: str, counts: bool) -> None:
    before = fingerprint(job(), "sm_90")
    change(file, text)
    assert (fingerprint(job(), "sm_90") != before) is counts


def test_a_changed_header_fails_the_check_and_names_the_build(change: Change, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    lock.write(path, run.audit_jobs([job()], ARCHES))
    assert lock.check_inputs(path, [job()], ARCHES).status == "same"
    assert len(lock.unchanged(path, [(job(), arch) for arch in ARCHES])) == 3
    change("second.cuh", HEADERS["second.cuh"].replace("1.0f", "2.0f"))
    comparison = lock.check_inputs(path, [job()], ARCHES)
    assert comparison.status == "changed"
    assert comparison.lines == tuple(
        f"source, options or contract changed: h_aggregate/cuda/k {arch}" for arch in ("sm_80", "sm_90a", "sm_100")
    )
    assert lock.unchanged(path, [(job(), arch) for arch in ARCHES]) == {}


def test_an_entry_that_no_build_has_and_a_build_without_entry_are_named(change: Change, tmp_path: Path) -> None:
    lock.write(tmp_path / "x.json", run.audit_jobs([job()], ["sm_90"]))
    other = job(build=Build(CudaKernel("h_aggregate", "k", (("X", 1),)), ("ascending",)))
    assert lock.check_inputs(tmp_path / "x.json", [other], ["sm_90"]).lines == (
        "not recorded: h_aggregate/cuda/k[X=1] sm_90a",
        "stale, no build has it: h_aggregate/cuda/k sm_90a",
    )
    lost = listing.Unlisted("norm", "cuda", "(all kernels)", "broken")
    assert "broken" in lock.check_inputs(tmp_path / "x.json", [job(), lost], ["sm_90"]).lines[0]


def test_a_wrong_histogram_of_a_sampled_entry_is_found(change: Change, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    chosen = sample.choose([job()], ["sm_90"])
    lock.write(path, run.audit_work(chosen))
    assert lock.compare(path, run.audit_work(chosen), None, ["sm_90"], sample=True).status == "same"
    content = json.loads(path.read_text())
    (entry,) = content["kernels"].values()
    assert "FADD:1 " in entry["opcodes"]
    entry["opcodes"] = entry["opcodes"].replace("FADD:1 ", "FADD:2 ")
    path.write_text(json.dumps(content))
    assert lock.check_inputs(path, [job()], ["sm_90"]).status == "same", "only compiling can tell"
    comparison = lock.compare(path, run.audit_work(chosen), None, ["sm_90"], sample=True)
    assert comparison.lines == ("changed: h_aggregate/cuda/k sm_90a: FADD 2 -> 1",)


def test_other_compilers_are_one_line_not_one_per_build(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.write(tmp_path / "x.json", run.audit_jobs([job()], ["sm_90"]))
    before = fingerprint(job(), "sm_90")
    monkeypatch.setattr(fingerprints, "_version", lambda compiler: "99.0")
    monkeypatch.setattr(lock, "compilers", lambda: {"nvrtc": "99.0"})
    assert fingerprint(job(), "sm_90") != before
    comparison = lock.check_inputs(tmp_path / "x.json", [job()], ["sm_90"])
    assert comparison.status == "compiler" and len(comparison.lines) == 1


def test_defines_architecture_options_limits_and_judges_count(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [fingerprint(job(), "sm_90"), fingerprint(job(), "sm_100")]
    found.append(fingerprint(job(build=Build(CudaKernel("h_aggregate", "k", (("X", 1),)), ("c",))), "sm_90"))
    found += [
        fingerprint(job(limits=limits), "sm_90") for limits in (Limits(fma="explicit"), Limits(off=frozenset("a")))
    ]
    found.append(fingerprint(job(limits=Limits(approximate=frozenset({"ex2.approx.f32"}))), "sm_90"))
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "OPTIONS", nvrtc.OPTIONS[1:])
        found.append(fingerprint(job(), "sm_90"))
    with monkeypatch.context() as patched:
        patched.setattr(fingerprints, "_judges", lambda: "other rules")
        found.append(fingerprint(job(), "sm_90"))
    assert len(set(found)) == len(found)
    assert fingerprint(job(), "sm_90") == fingerprint(job(contracts=("renamed",)), "sm_90a") == found[0]


def triton_job(
    function: object = planted_triton.calls_other, warps: int = 4, block: int = 256, kind: str = "*fp32"
) -> Job:
    signature = (("x", kind), ("n", "i32"), ("BLOCK", "constexpr"))
    return job(build=Build(TritonKernel(function, signature, (("BLOCK", block),), warps), ("c",)))


def test_everything_of_a_triton_build_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(triton_job(), "sm_90")
    found = [before, fingerprint(triton_job(), "sm_80"), fingerprint(triton_job(warps=8), "sm_90")]
    found += [fingerprint(triton_job(block=512), "sm_90"), fingerprint(triton_job(kind="*bf16"), "sm_90")]
    with monkeypatch.context() as patched:
        patched.setitem(triton_build.OPTIONS, "enable_fp_fusion", True)
        found.append(fingerprint(triton_job(), "sm_90"))
    with monkeypatch.context() as patched:  # a function that is called by one that is called
        patched.setattr(planted_triton.inner, "_src", planted_triton.inner.src.replace("+ 1.0", "+ 2.0"))
        found.append(fingerprint(triton_job(), "sm_90"))
    with monkeypatch.context() as patched:
        patched.setitem(planted_triton.inner.__globals__, "SHIFT", planted_triton.tl.constexpr(9))
        found.append(fingerprint(triton_job(), "sm_90"))
    assert len(set(found)) == len(found)
    with monkeypatch.context() as patched:  # the line where it stands is no part of it
        patched.setattr(planted_triton.calls_other, "starting_line_number", 999)
        assert fingerprint(triton_job(), "sm_90") == before


def test_comments_are_told_from_what_stands_in_quotes() -> None:
    text = "a = '/'; // one\nb = \"/* no */ // no\"; /* two\n three */ c = '\"'; // \"\n\n   \nd"
    assert without_comments(text) == "a = '/';\nb = \"/* no */ // no\";   c = '\"';\nd"


PRINT = """
import json
from samebits import registry
from samebits.audit.fingerprint import fingerprint
from samebits.audit.limits import STRICT
from samebits.audit.listing import Job
op = registry.operator("h_aggregate")
jobs = [Job(op.name, build, STRICT) for name in ("cuda", "triton") for build in op.backend(name).builds()]
found = {job.key("sm_90"): fingerprint(job, "sm_90") for job in jobs}
"""


def test_the_same_in_another_folder_and_another_process(tmp_path: Path) -> None:
    """Seen from a copy elsewhere, with another order of hashes: no path and no order enters."""
    shutil.copytree(Path(samebits.__file__).parent, tmp_path / "elsewhere" / "samebits")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "elsewhere"), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", f"{PRINT}\nprint(json.dumps(found))"],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    here: dict[str, dict[str, str]] = {}
    exec(PRINT, here)
    assert len(here["found"]) > 50 and json.loads(done.stdout) == here["found"]


def test_the_sample_has_every_kernel_and_turns_with_the_sources(change: Change) -> None:
    many = [job(build=Build(CudaKernel("h_aggregate", e, (("X", x),)), ("c",))) for e in "abc" for x in range(5)]
    chosen = sample.choose(many, ARCHES, most=5)
    assert len(chosen) == 5 and {one.entry for one, _ in chosen} == {one.entry for one in many}
    assert chosen == sample.choose(many[::-1], ARCHES, most=5)
    with pytest.raises(ValueError, match="cannot cover"):
        sample.choose(many, ARCHES, most=2)
    seen = set()
    for number in range(20):
        change("k.cu", SOURCE.replace("a[1]", f"a[{number}]"))
        seen |= {one.build for one, _ in sample.choose(many, ARCHES, most=9)}
    assert seen == {one.build for one in many}
