"""Recorded digests of the oracle on the integer inputs: a bit of the reference that changes shows as a diff.

``tests/golden/mhc_boundaries.json`` holds what every machine must give, ``mhc_boundaries.sm_90.json`` and the like all
boundaries of one GPU architecture. Where exp, sigmoid or rsqrt of the device enter a boundary, only the latter can hold it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from samebits import environment
from samebits.accept.block import BACKWARD, CONTROLLER_GRADIENTS
from samebits.accept.cases import CASES
from samebits.accept.contract import PROFILE, SCHEMA
from samebits.accept.trace import Trace
from samebits.verify import report

FOLDER = Path("tests") / "golden"
NAME = "mhc_boundaries"

PORTABLE = (
    *("controller.p", "controller.r", "controller.h"),
    *("bwd.d_c", "bwd.d_post", "grad.d_c", "grad.d_post"),
    *("gemm.y", "gemm.dx", "gemm.dweight"),
)
"""Only + - * / and the correctly rounded square root stand between the inputs and these: the same bytes on every machine."""

_ALL = "sigmoid, exp, rsqrt"
DEVICE_FUNCTIONS: dict[str, str] = {
    "split.pre": "sigmoid",
    "split.post": "sigmoid",
    "split.c": "exp",
    "pre.hidden": "sigmoid",
    "norm.normalized": "sigmoid, rsqrt",
    "norm.residual": "sigmoid",
    "post.r_new": "sigmoid, exp",
    "r_new": "sigmoid, exp",
    "bwd.dy_sublayer": "sigmoid",
    "grad.dy_sublayer": "sigmoid",
    **{f"{kind}.{key}": "sigmoid, rsqrt" for kind in ("bwd", "grad") for key in ("d_hidden", "d_gamma")},
    **dict.fromkeys((*BACKWARD[5:], "grad.d_r_old"), _ALL),
    **{f"grad.{key}": _ALL for key in CONTROLLER_GRADIENTS},
}
"""The other boundaries, with the functions of the device between the inputs and them."""


@dataclass(frozen=True)
class Judgement:
    """What a golden file says of a run. ``absent``: there is no such file here, which proves nothing."""

    file: str
    status: Literal["same", "differs", "absent"]
    compared: int = 0
    lines: tuple[str, ...] = ()


def recorded_cases() -> tuple[str, ...]:
    """The cases whose inputs no machine changes."""
    return tuple(case.name for case in CASES if case.family == "integer")


def judge(oracle: Mapping[str, Trace], device: torch.device) -> list[Judgement]:
    """The oracle's traces by case against the files of this checkout; a case that was not run is not asked for."""
    root = environment.checkout()
    wanted = [case for case in recorded_cases() if case in oracle]
    if root is None or not wanted:
        return []
    now = digests(oracle)
    portable = {key: value for key, value in now.items() if is_portable(key)}
    judged = [_against(root / FOLDER / f"{NAME}.json", portable, wanted)]
    if device.type == "cuda":
        judged.append(_against(path(root, device), now, wanted))
    return judged


def digests(oracle: Mapping[str, Trace]) -> dict[str, str]:
    """``{"case/boundary": digest}`` of the recorded cases among these."""
    cases = [case for case in recorded_cases() if case in oracle]
    return {f"{case}/{name}": value for case in cases for name, value in oracle[case].digests().items()}


def is_portable(key: str) -> bool:
    return key.split("/")[1] in PORTABLE


def path(root: Path, device: torch.device) -> Path:
    """The file that belongs to a device."""
    if device.type == "cpu":
        return root / FOLDER / f"{NAME}.json"
    major, minor = torch.cuda.get_device_capability(device)
    return root / FOLDER / f"{NAME}.sm_{major}{minor}.json"


def write(target: Path, oracle: Mapping[str, Trace], device: torch.device) -> int:
    """Record: on a CPU what is portable, on a GPU everything. Returns the number of digests."""
    found = digests(oracle)
    content: dict[str, Any] = {
        "schema_version": SCHEMA,
        "numeric_profile": PROFILE,
        "inputs": "the integer generator, samebits.accept.integer",
    }
    if device.type == "cpu":
        found = {key: value for key, value in found.items() if is_portable(key)}
        content["not_here"] = dict(sorted(DEVICE_FUNCTIONS.items()))
    else:
        content["made_on"] = report.environment(device)
    content["digests"] = found
    target.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return len(found)


def _against(file: Path, now: Mapping[str, str], cases: list[str]) -> Judgement:
    if not file.is_file():
        return Judgement(file.name, "absent")
    stored = {
        key: value for key, value in json.loads(file.read_text())["digests"].items() if key.split("/")[0] in cases
    }
    lines = [
        f"{key}: stored {stored.get(key, 'nothing')[:12]}, now {now.get(key, 'nothing')[:12]}"
        for key in sorted(stored.keys() | now.keys())
        if stored.get(key) != now.get(key)
    ]
    return Judgement(file.name, "differs" if lines else "same", len(stored.keys() | now.keys()), tuple(lines))
