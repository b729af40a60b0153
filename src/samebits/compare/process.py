"""A peer in a process-wide mode, in a process of its own; and what of peers and modes cannot run here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from samebits.bench import modes
from samebits.bench.modes import Mode
from samebits.bench.peers import Peer
from samebits.compare import entries
from samebits.compare.request import Request

CHILD_SECONDS = 1800.0
NO_COMPILER = "no C++ compiler, which torch.compile needs on a CPU"
LEFT_OUT = "torch.compile was left out; --compile takes it in"


def why_not(peer: Peer, request: Request) -> tuple[str, str] | None:
    """(status, reason) of a peer that will not be run, or None."""
    absent = peer.unavailable(request.device_type)
    if absent is not None:
        return "unavailable", absent
    if peer.compiled and not request.scale.compile:
        return "left out", LEFT_OUT
    if peer.compiled and request.device_type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "unavailable", NO_COMPILER
    return None


def in_mode(peer: Peer, mode: Mode, request: Request, expected: dict[str, str]) -> dict[str, Any]:
    """The entry of a peer in a mode. It compares with our operator in the same process, which must give our usual bits."""
    refusal = why_not(peer, request)
    absent = modes.missing(mode.enable.partition(":")[0]) if mode.enable else None
    if refusal is None and absent is not None:
        refusal = "unavailable", absent
    if refusal is None and mode.cuda and request.device_type != "cuda":
        refusal = "unavailable", "this mode is one of NVIDIA GPUs alone"
    if refusal is not None:
        return entries.not_compared(peer, mode, *refusal)
    if request.device_type == "cuda":
        torch.cuda.empty_cache()  # what this process holds of the memory without using it
    entry = _child(peer, mode, request)
    digests = entry.pop("digests", None)
    if digests is not None:
        if digests["inputs"] != expected["inputs"]:
            return entry | {"status": "failed", "reason": "its process drew other inputs: nothing was compared"}
        entry["ours_keeps_bits"] = digests["ours"] == expected["ours"]
    return entry


def _child(peer: Peer, mode: Mode, request: Request) -> dict[str, Any]:
    source = str(Path(entries.__file__).parents[2])
    settings = {name: value for name, value in os.environ.items() if name not in modes.VARIABLES}
    settings |= dict(mode.environment)
    settings["PYTHONPATH"] = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
    asked = json.dumps({"request": request.to_json(), "peer": peer.name, "mode": mode.name})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "entry.json"
        command = [sys.executable, "-m", "samebits.compare.child", str(out)]
        try:
            done = subprocess.run(
                command, input=asked, env=settings, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return entries.not_compared(peer, mode, "failed", f"not done after {CHILD_SECONDS:.0f} s")
        if done.returncode != 0 or not out.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            text = f"its process ended with code {done.returncode}: {last}"
            return entries.not_compared(peer, mode, "failed", text)
        entry: dict[str, Any] = json.loads(out.read_text())
        return entry
