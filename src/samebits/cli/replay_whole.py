"""``samebits replay --stage model|generation``: the whole transformer, patched, beside the same one as diffusers made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.cli.errors import UserError

if TYPE_CHECKING:
    import torch

    from samebits.models.minimax_h3.model_replay import Qualification
    from samebits.models.minimax_h3.model_source import Recipe

Progress = Callable[[int, int, str], None]
STEPS = 3
WIDTH_ON_CPU = 32


@dataclass(frozen=True)
class Asked:
    """What both stages take."""

    weights: Path | None
    synthetic: int | None
    width: int | None
    blocks: int | None
    contracts: Mapping[str, str]
    backend: str | None
    seed: int

    def recipe(self, device: torch.device) -> Recipe:
        from samebits.models.minimax_h3 import geometry, known, model_source

        _needed(known.require_known)
        if self.blocks is not None and self.blocks < 1:
            raise UserError(f"--blocks {self.blocks}: expected at least 1")
        folder = None if self.weights is None else str(self.weights)
        width = self.width or (WIDTH_ON_CPU if device.type == "cpu" else geometry.OFFICIAL.hidden_size)
        return model_source.Recipe(folder, self.synthetic or 0, width, self.blocks, str(device))


@dataclass(frozen=True)
class Found:
    result: Qualification
    files: Mapping[str, str]
    """Beside the report, by name."""

    def report(self, command: str, out: Path | None, json_file: Path | None) -> bool:
        """Print it, write what was asked for, and say whether it passed."""
        from samebits.cli import output
        from samebits.cli.figures import leave
        from samebits.report.model_replays import page, tables
        from samebits.report.terminal import rich_table

        content = self.result.to_json() | {"command": command}
        console = output.console()
        what = f"[bold]{self.result.model}, {self.result.stage}[/bold]: {self.result.geometry}, {self.result.device}"
        console.print(what, highlight=False)
        console.print(f"weights: {self.result.weights}; beside {self.result.peer}", highlight=False)
        for table in tables(content):
            console.print(rich_table(table))
        leave(content, page(content), out, json_file, console, self.files)
        return self.result.passed


def run_model(asked: Asked, device: torch.device, layouts: Sequence[str], backward: bool, progress: Progress) -> Found:
    from samebits.models.minimax_h3.model_replay import replay_model

    result = replay_model(
        asked.recipe(device).build(),
        layouts=layouts,
        contracts=asked.contracts,
        backend=asked.backend,
        seed=asked.seed,
        with_backward=backward,
        progress=progress,
    )
    return Found(result, {})


def run_generation(
    asked: Asked, device: torch.device, layout: str, steps: int | None, sealed: Path | None, progress: Progress
) -> Found:
    from samebits.models.minimax_h3.generation import Request, pipeline_class
    from samebits.models.minimax_h3.generation_replay import replay_generation
    from samebits.models.minimax_h3.sealed import read

    _needed(pipeline_class)
    request = Request(layout, STEPS if steps is None else steps, asked.seed)
    result = replay_generation(
        asked.recipe(device),
        request,
        contracts=asked.contracts,
        backend=asked.backend,
        earlier=None if sealed is None else read(sealed),
        progress=progress,
    )
    return Found(result, {"sealed.json": json.dumps(result.cases[0].record, indent=1, allow_nan=False) + "\n"})


def _needed(use: Callable[[], object]) -> None:
    """What diffusers must have, asked for before a long run."""
    try:
        use()
    except (ImportError, RuntimeError) as error:
        raise UserError(str(error)) from error
