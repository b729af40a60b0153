"""The sealed record of a generation: digests of all that went in and came out at every step, and one over them all.

Two generations with the same seal had the same bits throughout; where two differ, the first entry that does is named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from samebits.exact.bits import digest
from samebits.models.minimax_h3.generation import Generation, Request

KIND = "minimax_h3_generation"
SEAL = "sha256"
Sealed = dict[str, Any]


def seal(made: Generation, request: Request, weights_sha256: str, contracts: Mapping[str, str], peer: str) -> Sealed:
    """In the order in which things happen, so that the first difference is the earliest."""
    content: Sealed = {
        "kind": KIND,
        "request": asdict(request),
        "model": {"weights_sha256": weights_sha256, "contracts": dict(sorted(contracts.items())), "code": peer},
        "layout": {name: digest(value) for name, value in made.layout.items()},
        "sigmas": {"video": made.sigmas[0], "audio": made.sigmas[1]},
        "text": digest(made.text),
        "conditions": digest(made.conditions),
        "noise": _both(made.steps[0].rows, "rows"),
        "steps": [
            {
                "timesteps": step.given["timestep"].tolist(),
                "timestep_indices": digest(step.given["timestep_indices"]),
                **_both(step.rows, "rows"),
                **_both(step.velocities, "velocity"),
            }
            for step in made.steps
        ],
        "result": _both(made.result, "latents"),
    }
    return content | {SEAL: _hash(content)}


def _both(values: tuple[Tensor, Tensor], what: str) -> dict[str, str]:
    return {f"{name} {what}": digest(value) for name, value in zip(("video", "audio"), values, strict=True)}


def _hash(content: Sealed) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read(path: Path) -> Sealed:
    """Raises ValueError: no sealed record, or one that was changed after it was sealed."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{path}: not a sealed generation")
    rest = {name: value for name, value in content.items() if name != SEAL}
    if content.get(SEAL) != _hash(rest):
        raise ValueError(
            f"{path}: the seal is broken: its content has sha256 {_hash(rest)}, it says {content.get(SEAL)}"
        )
    return content


def first_difference(one: Any, other: Any, at: str = "") -> str | None:
    """Where two records first differ, like ``steps.2.video velocity``; None where they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(name, one.get(name), other.get(name)) for name in [*one, *(set(other) - set(one))] if name != SEAL]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(place), *both) for place, both in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else at
    inside = (first_difference(left, right, f"{at}.{name}".lstrip(".")) for name, left, right in pairs)
    return next((found for found in inside if found is not None), None)
