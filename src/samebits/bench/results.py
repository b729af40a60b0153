"""Result lines: one JSON object per line, the same keys in every line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.bench.case import Case, output_bytes, traffic, width
from samebits.bench.timing import Failure, Machine, Sample
from samebits.contract import OpSpec
from samebits.environment import Environment

KEYS = (
    "op", "contract", "backend", "direction", "shape", "dtype", "us", "us_min", "us_max", "gbps", "copy_fraction", "tflops",
    "peers", "bits_checked", "extra_bytes", "gpu", "driver", "torch", "triton", "nvrtc", "commit",
)  # fmt: skip
"""Every measured line has these; further keys may follow."""
SKIPPED_KEYS = ("op", "direction", "shape", "dtype", "skipped")
"""A line about what was not measured, and why."""


FP32_GRADIENTS = "gradients float32"


def case_dtype(case: Case, dtype: str) -> str:
    """The ``dtype`` of the activations, and of the gradients in flight."""
    return dtype if case.grads == "model" else f"{dtype}, {FP32_GRADIENTS}"


def has_fp32_gradients(line: Mapping[str, Any]) -> bool:
    """Whether a line is of gradients that stay FP32 where the model's dtype is narrower."""
    return str(line["dtype"]).endswith(FP32_GRADIENTS)


def measured(
    spec: OpSpec,
    case: Case,
    contract: str,
    backend: str,
    sample: Sample,
    peers: dict[str, Sample | Failure],
    bits: tuple[bool, str],
    machine: Machine,
    environment: Environment,
    plan: str,
) -> dict[str, Any]:
    return {
        "op": case.op,
        "contract": contract,
        "backend": backend,
        "direction": case.direction,
        "shape": case.shape(),
        "dtype": case_dtype(case, width(spec)),
        **timing(sample, peers, traffic(spec, case), bits, machine, environment),
        "output_bytes": output_bytes(spec, case),
        "plan": plan,
    }


def timing(
    sample: Sample,
    peers: Mapping[str, Sample | Failure],
    moved: int,
    bits: tuple[bool, str],
    machine: Machine,
    environment: Environment,
) -> dict[str, Any]:
    """What a line says of a time: with its peers, against a copy of ``moved`` bytes, and where it was measured."""
    gbps = moved / sample.us * 1e-3
    stamp = environment.to_json()
    return {
        "us": round(sample.us, 3),
        "us_min": round(sample.us_min, 3),
        "us_max": round(sample.us_max, 3),
        "gbps": round(gbps, 1),
        "copy_fraction": round(gbps / machine.copy_gbps, 4),
        "tflops": None,
        "peers": {name: peer_entry(peer, sample) for name, peer in peers.items() if isinstance(peer, Sample)},
        "bits_checked": bits[0],
        "extra_bytes": sample.extra_bytes,
        **{key: stamp[key] for key in ("gpu", "driver", "torch", "triton", "nvrtc", "commit")},
        "bits": bits[1],
        "bytes": moved,
        "copy_gbps": round(machine.copy_gbps, 1),
        "launch_floor_us": round(machine.launch_floor_us, 3),
        "host_us": round(sample.host_us, 2),
        "rounds": sample.rounds,
        "method": sample.method,
        "peers_skipped": {name: peer.reason for name, peer in peers.items() if isinstance(peer, Failure)},
    }


def of_parts(
    head: Mapping[str, Any],
    ours: Sample | Failure,
    peers: Mapping[str, Sample | Failure],
    moved: int,
    machine: Machine,
    environment: Environment,
) -> dict[str, Any]:
    """The line of several operators timed as one, which are checked by themselves; ``head`` has the keys in front of ``us``."""
    if isinstance(ours, Failure):
        return {**head, "skipped": ours.reason}
    bits = (False, "the operators inside are checked in their own lines")
    return {**head, **timing(ours, peers, moved, bits, machine, environment)}


def peer_entry(peer: Sample, ours: Sample) -> dict[str, Any]:
    line: dict[str, Any] = {
        "us": round(peer.us, 3),
        "ratio": round(peer.us / ours.us, 4),
        "host_us": round(peer.host_us, 2),
        "extra_bytes": peer.extra_bytes,
    }
    return line if peer.method == "graph" else {**line, "method": peer.method}


def skipped(
    case: Case, dtype: str, reason: str, contract: str | None = None, backend: str | None = None
) -> dict[str, Any]:
    named = {key: value for key, value in (("contract", contract), ("backend", backend)) if value is not None}
    return {
        "op": case.op,
        **named,
        "direction": case.direction,
        "shape": case.shape(),
        "dtype": case_dtype(case, dtype),
        "skipped": reason,
    }


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace the file in one step, so that a run that dies leaves the old results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(path)


def gather(path: Path | None, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All lines, which then replace the file at ``path``; until then, and if the run is stopped, they are in ``<path>.part``."""
    found: list[dict[str, Any]] = []
    if path is None:
        return list(lines)
    part = path.with_name(f"{path.name}.part")
    for line in lines:
        found.append(line)
        write(part, found)
    write(path, found)
    part.unlink(missing_ok=True)
    return found


def record(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Print lines as they come and write the file anew with each, so that a run that is stopped has left what it measured."""
    kept = []
    for line in lines:
        kept.append(line)
        told = {name: f"{peer['us']:.1f} ({peer['ratio']:.2f}x)" for name, peer in line.get("peers", {}).items()}
        shown = {key: line.get(key) for key in ("contract", "direction", "shape", "us", "skipped", "peers_skipped")}
        print(json.dumps(shown), told, flush=True)
        write(path, kept)


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All lines of the files. ValueError names the file and line that is not a result."""
    lines = []
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            needed = SKIPPED_KEYS if isinstance(line, dict) and "skipped" in line else KEYS
            missing = [key for key in needed if not isinstance(line, dict) or key not in line]
            if missing:
                raise ValueError(
                    f"{path}, line {number}: not a benchmark result, it lacks {', '.join(map(repr, missing))}"
                )
            lines.append(line)
    return lines
