"""Recorded results as Python objects, refused with the file's name where they are something else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.bench import results


@dataclass(frozen=True)
class Recorded:
    """What a report is made from. None: that part was not run."""

    checks: tuple[dict[str, Any], ...] | None = None
    example: dict[str, Any] | None = None
    """Check result of a candidate that is shown for its failure and counts nowhere."""
    audit: dict[str, Any] | None = None
    models: tuple[dict[str, Any], ...] | None = None
    bench: tuple[dict[str, Any], ...] | None = None
    bench_note: str = ""
    """Where ``bench`` comes from, if another run measured it."""


CHECK_KEYS = ("candidate", "options", "checks")
AUDIT_KEYS = ("clean", "reports")
MODEL_KEYS = ("title", "chained", "checks")
REPLAY_KEYS = ("stage", "peer", "device", "environment", "cases")


def load(
    check: Sequence[Path],
    audit: Path | None,
    model: Sequence[Path],
    bench: Sequence[Path],
    example: Path | None = None,
) -> Recorded:
    """Read every file. ValueError says which file is not what it was given as."""
    return Recorded(
        checks=tuple(entry for path in check for entry in _objects(path, "check", CHECK_KEYS)) if check else None,
        example=_objects(example, "check", CHECK_KEYS)[0] if example else None,
        audit=_objects(audit, "audit", AUDIT_KEYS)[0] if audit else None,
        models=tuple(entry for path in model for entry in _objects(path, "model", MODEL_KEYS)) if model else None,
        bench=tuple(results.read(bench)) if bench else None,
    )


def replay(path: Path) -> dict[str, Any]:
    """The record of a replay. ValueError says that the file is something else."""
    return _objects(path, "replay", REPLAY_KEYS)[0]


def _objects(path: Path, kind: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """A file holds one result or a list of them."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    entries = content if isinstance(content, list) else [content]
    for entry in entries:
        missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise ValueError(f"{path}: not a {kind} result, it lacks {', '.join(map(repr, missing))}")
    if not entries:
        raise ValueError(f"{path}: holds no {kind} result")
    return entries
