"""The public manifest: our formulas have its bytes, boundary by boundary."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samebits.accept import block
from samebits.accept.cases import MANIFEST_CASES

HERE = Path(__file__).parent
MANIFEST = json.loads((HERE.parent / "golden" / "mhc_manifest.json").read_text())
SAME_AS = {f"grad.{key}": f"bwd.{key}" for key in block.SHARED_GRADIENTS} | {"r_new": "post.r_new"}
ANYWHERE = ("sinkhorn.pre", "sinkhorn.post", "sinkhorn.c", "rms.y", "rms.residual")
"""Edges whose inputs are written down, not drawn, and whose bits held on every machine that was tried."""
AFTER_THE_ROOT = {
    *("controller.r", "controller.h", "split.pre", "split.post", "split.c"),
    *("bwd.dy_sublayer", "bwd.d_r_old", "bwd.d_stream0", "bwd.d_stream1", "bwd.d_stream2", "bwd.d_stream3"),
    *(f"grad.{key}" for key in block.CONTROLLER_GRADIENTS),
    *("pre.hidden", "norm.normalized", "norm.residual", "post.r_new", "bwd.d_hidden", "bwd.d_gamma"),
}


@functools.cache
def digests(oracle: str) -> dict[str, Any]:
    """As the manifest's machine computes them: AVX2 vectors, and the general code path of MKL, on any x86."""
    settings = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
    known = os.environ | settings | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    words = [sys.executable, str(HERE / "published_digests.py"), oracle]
    run = subprocess.run(words, env=known, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def expected(case: str) -> dict[str, str]:
    """All 32 or 27 entries of a case of the manifest, in its order."""
    named = {name: prefix for name, prefix in MANIFEST["cases"][case].items() if prefix is not None}
    order = block.boundary_names(mixer_frozen=case == "mixer_frozen")
    return {name: named[SAME_AS.get(name, name)] for name in order}


def differing(case: str, oracle: str) -> set[str]:
    found = digests(oracle)["cases"][case]
    return {name for name, prefix in expected(case).items() if not found[name].startswith(prefix)}


def test_the_manifest_is_whole() -> None:
    assert set(MANIFEST["cases"]) == set(MANIFEST_CASES)
    counts = {case: len(expected(case)) for case in MANIFEST_CASES}
    assert counts == dict.fromkeys(MANIFEST_CASES, 32) | {"mixer_frozen": 27}
    assert sum(counts.values()) + len(MANIFEST["edges"]) == 163
    assert MANIFEST["numeric_profile"] == "oracle-fp32-mhc-v1" and MANIFEST["schema_version"] == "p1-mhc-layer-v1"
    prefixes = [prefix for case in MANIFEST_CASES for prefix in expected(case).values()]
    assert {len(prefix) for prefix in prefixes} == {16} and len(set(prefixes)) > 100


@pytest.mark.parametrize("case", MANIFEST_CASES)
def test_the_formulas_give_every_published_digest(case: str) -> None:
    """With the square root of the machine that made the manifest. The draws are its draws where the vectors are AVX2."""
    about, found = digests("torch")["about"], digests("torch")["cases"][case]
    assert found["names"] == list(expected(case))
    if about["capability"] == "AVX2" and (about["mkl"] or case in ("one_row", "packed_t7_odd")):
        assert differing(case, "torch") == set()
    else:  # no such machine: the cases are other draws, and only their shape can be judged here
        assert all(len(found[name]) == 64 for name in found["names"])


def test_the_edges_give_every_published_digest() -> None:
    found = digests("torch")
    edges = {name: digest for case in ("sinkhorn_edges", "rms_edges") for name, digest in found["cases"][case].items()}
    assert set(edges) - {"names"} == set(MANIFEST["edges"])
    judged = MANIFEST["edges"] if found["about"]["capability"] == "AVX2" else ANYWHERE
    assert [name for name in judged if not edges[name].startswith(MANIFEST["edges"][name])] == []


@pytest.mark.parametrize("case", MANIFEST_CASES)
def test_a_correctly_rounded_root_differs_only_behind_it(case: str) -> None:
    """The manifest holds roots that are one bit off; an IEEE root gives everything that no such root reaches."""
    about = digests("ieee")["about"]
    if about["capability"] == "AVX2":
        off = differing(case, "ieee")
        assert off <= {name for name in expected(case) if SAME_AS.get(name, name) in AFTER_THE_ROOT}
        assert bool(off) == (case not in ("one_row", "packed_t7_odd"))
        assert bool(off) == ("controller.r" in off)
    if about["mkl"] and about["capability"] == "AVX2":
        assert about["roots_wrong"] > 100  # of 4096: the library's square root is not the IEEE one


@pytest.mark.parametrize("case", MANIFEST_CASES)
def test_the_reference_has_the_correctly_rounded_root(case: str) -> None:
    """Also where torch's own square root is wrong: the contract says IEEE, on every machine."""
    assert digests("reference")["cases"][case] == digests("ieee")["cases"][case]
