"""Figures for print from the record of a replay: what a paper shows of it, one file a figure, and a caption for each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from samebits.report.plots import chains, wholes
from samebits.report.plots.parts import Plot
from samebits.report.plots.style import FORMATS, encoded

__all__ = ["CAPTIONS", "FORMATS", "Plot", "digest", "plots", "shown", "write"]

CAPTIONS = "captions.txt"
_STAGES: dict[str, Callable[[dict[str, Any]], Iterable[Plot]]] = {
    "conditioning": chains.conditioning,
    "block": chains.block,
    "model": wholes.model,
    "generation": wholes.generation,
}


def write(replay: dict[str, Any], folder: Path, form: str = "png", only: Sequence[str] | None = None) -> list[Path]:
    """The figures of a record, or those that are named, and ``captions.txt``; the paths of the figures.

    Raises:
        ValueError: it is not the record of a replay, or has no figure of such a name.
        ModuleNotFoundError: matplotlib is not installed; nothing was written.
    """
    chosen = plots(replay)
    names = [plot.name for plot in chosen]
    for name in only or ():
        if name not in names:
            raise ValueError(f"no figure {name!r} of this record; choose {', '.join(names)}")
    made = [
        (f"{plot.name}.{form}", encoded(plot.draw(), form), plot.caption)
        for plot in chosen
        if not only or plot.name in only
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for file, content, _ in made:
        (folder / file).write_bytes(content)
    captions = [f"{file}: {caption}" for file, _, caption in made]
    (folder / CAPTIONS).write_text("\n\n".join([*captions, f"Drawn from the record {digest(replay)}."]) + "\n")
    return [folder / file for file, *_ in made]


def shown(replay: dict[str, Any]) -> list[Plot]:
    """Every figure that is not a part of another one, ``nodes`` and not ``nodes-error``."""
    made = plots(replay)
    return [plot for plot in made if not any(plot.name.startswith(f"{other.name}-") for other in made)]


def digest(replay: dict[str, Any]) -> str:
    """Of a record, so that a figure can be known to be of it."""
    return hashlib.sha256(json.dumps(replay, sort_keys=True).encode()).hexdigest()[:16]


def plots(replay: dict[str, Any]) -> list[Plot]:
    """Every figure of a record.

    Raises:
        ValueError: it is not the record of a replay.
    """
    stage = replay.get("stage")
    if stage not in _STAGES or not replay.get("cases"):
        raise ValueError(f"not the record of a replay: its stage is {stage!r}, not one of {', '.join(_STAGES)}")
    return list(_STAGES[stage](replay))
