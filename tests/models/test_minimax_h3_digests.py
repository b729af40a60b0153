"""A whole block, forward and backward, by a CPU as by an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import samebits
from samebits.models.minimax_h3 import digests

GOLDEN = Path(__file__).parents[1] / "golden" / "minimax_h3_block.sm_90.json"


def stored() -> dict[str, str]:
    found: dict[str, str] = json.loads(GOLDEN.read_text())["digests"]
    return found


def test_a_cpu_gives_the_block_of_the_gpu() -> None:
    with samebits.bits_of("sm_90"):
        found = digests.digests()
    assert found == stored()
    assert len([name for name in found if name.startswith("node/")]) == 17
    assert len([name for name in found if name.startswith("gradient/")]) == 14 + 17


def test_the_command_says_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"node/norm1/0": "1", "gradient/temb": "2"}
    asked = []
    monkeypatch.setattr(digests, "digests", lambda *given, **more: asked.append((given, more)) or dict(made))
    path = tmp_path / "block.json"
    assert digests.main(["--device", "cpu", "--write", str(path)]) == 0
    assert digests.main(["--device", "cpu", "--compare", str(path)]) == 0
    made["gradient/temb"] = "3"
    assert digests.main(["--device", "cpu", "--width", "64", "--compare", str(path)]) == 1
    assert "gradient/temb differs" in capsys.readouterr().out
    assert asked[-1] == ((64, digests.LAYOUT), {"device": "cpu"})


@pytest.mark.gpu
def test_the_gpu_gives_what_a_cpu_foretold() -> None:
    assert torch.cuda.get_device_capability() == (9, 0), "the digests are of sm_90"
    assert digests.digests(device="cuda") == stored()
