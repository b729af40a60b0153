"""Each example, run as a user runs it: a process, judged by what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str, ahead: Path | None = None) -> str:
    """What an example prints. ``ahead``: a folder whose modules hide the installed ones."""
    places = [str(folder) for folder in (ahead, ROOT / "src") if folder is not None]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "" or "Warning" in ended.stderr, ended.stderr
    return ended.stdout


def test_examples_are_short_and_listed():
    found = sorted((ROOT / "examples").glob("*.py"))
    assert len(found) == 4
    readme = (ROOT / "README.md").read_text()
    for example in found:
        text = example.read_text()
        assert len(text.splitlines()) < 60, example.name
        assert f"python examples/{example.name}" in text, "how to run it"
        assert f"examples/{example.name}" in readme


def test_a_norm_that_is_batch_invariant_and_one_that_is_not():
    shown = run("batch_invariant_norm.py")
    good, bad = shown.split("split_norm: ")
    assert good.startswith("tree_norm: the same bits in every batch\n") and "fail" not in good
    assert bad.startswith("NOT batch-invariant\n")
    assert re.search(r"forward_accuracy +pass", bad), "its values are right"
    for check in ("forward_invariance", "gradient_invariance"):
        assert re.search(rf"{check} +pass", good) and re.search(rf"{check} +fail", bad)
    assert re.search(r"out, batch size 8 vs 40: row \d+, column \d+: 0x\w{8} ", bad)


def test_where_trainer_and_server_part(tmp_path: Path):
    shown = run("trainer_and_server.py", str(tmp_path))
    assert "parameters and buffers: 4 of 4 agree" in shown
    assert "forward: FIRST DRIFT norm (RMSNorm): inputs agree, outputs differ" in shown
    assert "row 5 of A, row 0 of B first, 1 of 1 rows differ; in it element" in shown
    # with the trainer's norm, the product may still depend on the batch: that is up to the CPU
    assert re.search(r"^with the trainer's norm: (the same bits|the next drift is head \(Linear\))$", shown, re.M)
    assert "FIRST DRIFT: " in (tmp_path / "drift.html").read_text()


def test_deepseek_v4_before_and_after_the_patch():
    before, after = run("patch_deepseek_v4.py").split("\npatched:\n")
    first = re.compile(r"first in forward: (\S+)")
    assert "model.layers.0.attn_hc" in first.findall(before) and "rows depend on the batch" in before
    ours = [path for path in first.findall(after) if re.search("_hc|hc_|norm", path)]
    assert ours == []  # a product of the class may be named on some CPU
    assert re.search(r"^repeat +pass", after, re.M) and after.count(" compared") == 7
    assert "our operators ran at 10 call sites" in after


def test_a_diffusion_step_that_is_sealed_and_run_again(tmp_path: Path):
    kept = tmp_path / "sealed.json"
    shown = run("replay_diffusion_step.py", str(kept))
    assert "36 call sites patched, beside diffusers" in shown
    assert re.findall(r"^(.*): the same bits at every step$", shown, re.M) == [
        "beside another sequence in the batch",
        "in another process",
    ]
    assert "OTHER BITS" not in shown and "beside the class unpatched, the first that differs: " in shown
    record = json.loads(kept.read_text())
    assert record["kind"] == "minimax_h3_generation" and len(record["steps"]) == 2


@pytest.fixture
def no_diffusers(tmp_path: Path) -> Path:
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'diffusers'\")\n")
    return tmp_path


def test_a_diffusion_step_where_diffusers_is_missing(no_diffusers: Path):
    with pytest.raises(AssertionError, match="this example runs diffusers: No module named 'diffusers'; pip install"):
        run("replay_diffusion_step.py", ahead=no_diffusers)
