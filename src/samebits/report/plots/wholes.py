"""Plots of a replay of the whole model along its depth, and of a generation along its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from samebits.report.plots import lines
from samebits.report.plots.parts import Context, Plot, agreement, both, context, finite, table, varying
from samebits.report.plots.style import Panel, Series


def model(replay: dict[str, Any]) -> Iterable[Plot]:
    """One for each layout."""
    about = context(replay)
    for case in replay["cases"]:
        at = case["boundaries"]
        rows = both([at], about, lambda entry, who: varying(entry[f"{who}rows"]))
        panels = (
            _distance(at, about),
            Panel("share", f"differ from\n{about.peer}", agreement([at])),
            Panel("share", "rows that\nvary", rows),
        )
        said = (
            f"along the depth of the model, {case['title']}: distance from FP64; share of elements whose bits are not "
            f"{about.whose}, all chained or each part given {about.whose} inputs; share of rows whose bits change alone or "
            f"elsewhere in the batch. {about.where}"
        )
        names = [_short(entry["name"]) for entry in at]
        yield Plot(f"depth-{case['layout']}", said, partial(lines.along_depth, names, panels))


def generation(replay: dict[str, Any]) -> Iterable[Plot]:
    about = context(replay)
    for case in replay["cases"]:
        steps = case["steps"]
        apart = (
            Series("third", "latents", table([steps], lambda step: finite(step["rows_apart"]))),
            Series("chained", "velocity", table([steps], lambda step: finite(step["velocity_apart"]))),
            Series(
                "isolated",
                f"velocity, {about.whose} latents",
                table([steps], lambda step: finite(step["forced_apart"])),
            ),
        )
        panels = (Panel("error", "distance /\nlargest value", apart), _distance(steps, about))
        said = (
            f"step by step, {case['title']}: how far latents and velocities are from {about.whose} when both run free, and the "
            f"velocity when ours is given {about.whose} latents; distance of that velocity and of {about.whose} from FP64. "
            f"{about.where}"
        )
        names = [str(step["step"]) for step in steps]
        yield Plot(f"steps-{case['request']['layout']}", said, partial(lines.along_steps, names, panels))


def _distance(entries: Sequence[Any], about: Context) -> Panel:
    distances = both([entries], about, lambda entry, who: finite(entry[f"{who}rms"]))
    return Panel("error", "RMS error /\nRMS of FP64", distances)


def _short(name: str) -> str:
    return name.replace("transformer_blocks.", "block ").replace("token_refiner.refiner_blocks.", "refiner ")
