"""``samebits replay``: a model's operators beside the model's own code: its chain, a block, the whole model, a generation."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.errors import UserError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from samebits.models.minimax_h3.candidate import Candidate
    from samebits.models.minimax_h3.latency import Clock
    from samebits.models.minimax_h3.record import Replay
    from samebits.models.minimax_h3.weights import Weights

MODELS = {"minimax-h3": ("conditioning", "block", "model", "generation")}
"""Model to the parts of it that can be replayed."""
NODES = ("conditioning", "block")
"""Parts that are a chain of nodes; the others run the whole transformer, patched."""
OPTIONS = {
    "--timesteps": ("conditioning",),
    "--seq-lens": ("conditioning",),
    "--layout": ("conditioning",),
    "--layouts": ("block", "model", "generation"),
    "--backward": ("conditioning", "block", "model"),
    "--against": NODES,
    "--bind": NODES,
    "--blocks": ("model", "generation"),
    "--steps": ("generation",),
    "--sealed": ("generation",),
}
"""Which parts have what not all of them have."""
TIMESTEPS = "1,2,3,4"
SEQ_LENS = {"cuda": "3,257,4097,32768", "cpu": "3,257"}
LAYOUTS = {"cuda": "tiny,small,medium", "cpu": "mini"}
GENERATED = {"cuda": "tiny", "cpu": "mini"}
LAYOUT = "interleaved"
WIDTH_ON_CPU = 64


def replay(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="minimax-h3.")],
    stage: Annotated[str, typer.Option(help="The part: conditioning, block, model or generation.")],
    timesteps: Annotated[
        str | None,
        typer.Option(metavar="T,...", help=f"Conditioning: numbers of distinct timesteps. Default: {TIMESTEPS}."),
    ] = None,
    seq_lens: Annotated[
        str | None,
        typer.Option(
            metavar="S,...", help=f"Conditioning: rows. Default: {SEQ_LENS['cuda']}; on a CPU {SEQ_LENS['cpu']}."
        ),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Block, model: packed layouts, of mini, tiny, small, medium; generation: one. "
            f"Default: {LAYOUTS['cuda']}; on a CPU {LAYOUTS['cpu']}.",
        ),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Replay the gradients too.")] = False,
    blocks: Annotated[
        int | None, typer.Option(metavar="N", help="Model, generation: how many blocks, of 50. Default: 2.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="K", help="Generation: calls of the model. Default: 3.")] = None,
    sealed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Generation: an earlier sealed.json that must come out again.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder of `samebits prepare minimax-h3`; model, generation: of the transformer itself."),
    ] = None,
    synthetic: Annotated[
        int | None, typer.Option(metavar="SEED", help="Random weights, the same bits on every machine.")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            help=f"A reduced model of this hidden size (synthetic weights). Default on a CPU: {WIDTH_ON_CPU}."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The peer: diffusers, or provider, its replay in eager torch.")
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=MODULE:FUNCTION", help="Run a node by a callable of yours. Repeatable."),
    ] = None,
    contract: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE=NAME", help="Contract of a node's operator; model, generation: of an operator. Repeatable."
        ),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Of our operators: cuda, triton or reference.")] = None,
    layout: Annotated[str | None, typer.Option(help=f"Conditioning: interleaved or block. Default: {LAYOUT}.")] = None,
    seed: Annotated[int, typer.Option(help="Of timesteps, layout, rows and upstream gradients.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for replay.json, index.html and figures.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Run a part of the model by our operators and by diffusers on the same inputs; compare bits, rows and distance from FP64.

    conditioning: seven stages from the timestep to the last norm. block: the seventeen nodes of block 0, beside the real
    block, with planted faults. Per stage: repeat, a row alone beside the row in the batch (ours and the peer's), bits chained
    and isolated, error, latency (forward, for orientation). model: the whole patched transformer, boundary by boundary.
    generation: the real pipeline's layout, schedules and denoising around it, in two processes and beside other sequences.
    The weights are those of --weights, of the folder named in SAMEBITS_MINIMAX_H3_WEIGHTS (conditioning and block), or
    synthetic ones with seed 0.

    Exit code 0: every promise was kept, 1: one was not, 2: wrong use.
    """
    if model not in MODELS:
        raise UserError(f"no model {model!r} can be replayed; choose {', '.join(MODELS)}")
    if stage not in MODELS[model]:
        raise UserError(f"--stage {stage}: of {model}, choose {', '.join(MODELS[model])}")
    if weights is not None and (synthetic is not None or width is not None):
        raise UserError("--weights are the released ones; leave --synthetic and --width out")
    given = {
        "--timesteps": timesteps,
        "--seq-lens": seq_lens,
        "--layout": layout,
        "--layouts": layouts,
        "--backward": backward or None,
        "--against": against,
        "--bind": bind or None,
        "--blocks": blocks,
        "--steps": steps,
        "--sealed": sealed,
    }
    for option, value in given.items():
        if value is not None and stage not in OPTIONS[option]:
            raise UserError(f"{option}: --stage {stage} does not have it")
    from samebits.cli import output

    output.require_folder(json_file)
    rest = {
        "--weights": weights,
        "--synthetic": synthetic,
        "--width": width,
        "--contract": contract,
        "--backend": backend,
    }
    command = _command(model, {"--stage": stage, **given, **rest, "--seed": seed or None, "--device": device})
    where = _device(device)
    if stage not in NODES:
        from samebits.cli import replay_whole

        named = _pairs("--contract", contract or [])
        asked = replay_whole.Asked(weights, synthetic, width, blocks, named, backend, seed)
        names = _layouts((LAYOUTS if stage == "model" else GENERATED)[where.type] if layouts is None else layouts)
        with _progress() as progress:
            if stage == "model":
                found = replay_whole.run_model(asked, where, names, backward, progress)
            elif len(names) > 1:
                raise UserError(f"--layouts {layouts}: --stage generation makes one video, of one layout")
            else:
                found = replay_whole.run_generation(asked, where, names[0], steps, sealed, progress)
        raise typer.Exit(0 if found.report(command, out, json_file) else 1)
    bindings, contracts = _pairs("--bind", bind or []), _pairs("--contract", contract or [])

    from samebits.models.minimax_h3 import candidate as candidates
    from samebits.models.minimax_h3.block import BLOCK
    from samebits.models.minimax_h3.chain import StageError
    from samebits.models.minimax_h3.stages import CONDITIONING

    of_block = stage == "block"
    chain = BLOCK if of_block else CONDITIONING
    candidate = candidates.Candidate(bindings, backend, contracts, chain)
    options: dict[str, Any] = {"candidate": candidate, "against": against, "seed": seed, "with_backward": backward}
    _refuse_what_cannot_run(candidate, against)
    if of_block:
        options["layouts"] = _layouts(LAYOUTS[where.type] if layouts is None else layouts)
    else:
        counts = _numbers("--timesteps", TIMESTEPS if timesteps is None else timesteps)
        lengths = _numbers("--seq-lens", SEQ_LENS[where.type] if seq_lens is None else seq_lens)
        chosen = LAYOUT if layout is None else layout
        _refuse_layout(chosen, counts, lengths)
        options |= {"timesteps": counts, "seq_lens": lengths, "layout": chosen}
    loaded = _weights(weights, synthetic, width, where, of_block).to(where)
    options["clock"] = _clock(where)
    try:
        with _progress() as progress:
            result = _run(stage, loaded, options | {"progress": progress})
    except StageError as error:
        typer.echo(f"samebits replay: {error}", err=True)
        raise typer.Exit(1) from error
    _report(result, command, out, json_file)
    raise typer.Exit(0 if result.passed else 1)


def _run(stage: str, weights: Weights, options: dict[str, Any]) -> Replay:
    from samebits.models.minimax_h3 import block_replay
    from samebits.models.minimax_h3 import replay as replaying

    return block_replay.replay_block(weights, **options) if stage == "block" else replaying.replay(weights, **options)


def _report(result: Replay, command: str, out: Path | None, json_file: Path | None) -> None:
    from samebits.cli import output
    from samebits.cli.figures import leave
    from samebits.report.replays import page

    content, console = result.to_json() | {"command": command}, output.console()
    _show(result, console)
    leave(content, page(content), out, json_file, console)


def _command(model: str, given: Mapping[str, Any]) -> str:
    """The call that was made, as a line for a shell, without where its results went."""
    words = ["samebits", "replay", model]
    for option, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [option] if one is True else [option, str(one)]
    return shlex.join(words)


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"{option} {text}: expected positive numbers, e.g. 1,3")
    return [int(word) for word in words]


def _layouts(text: str) -> list[str]:
    from samebits.models.minimax_h3.layouts import NAMED

    names = [word.strip() for word in text.split(",") if word.strip()]
    if not names or not set(names) <= set(NAMED):
        raise UserError(f"--layouts {text}: choose of {', '.join(NAMED)}")
    return names


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        stage, equals, value = text.partition("=")
        if not (stage and equals and value):
            raise UserError(f"{option} {text}: write STAGE=VALUE")
        if stage in found:
            raise UserError(f"{option}: stage {stage} is given twice")
        found[stage] = value
    return found


def _device(device: str | None) -> torch.device:
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UserError(f"--device {device}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is visible to torch")
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _refuse_what_cannot_run(candidate: Candidate, against: str | None) -> None:
    """Mistakes that would only show in the middle of a long run."""
    from samebits.models.minimax_h3.record import the_peer

    for name in candidate.chain.names:
        candidate(name)
    try:
        the_peer(against)
    except ImportError as error:
        raise UserError(f"--against {against}: {error}") from error


def _refuse_layout(layout: str, counts: Sequence[int], lengths: Sequence[int]) -> None:
    from samebits.models.minimax_h3.layouts import SYNTHETIC

    if layout not in SYNTHETIC:
        raise UserError(f"--layout {layout}: choose one of {', '.join(SYNTHETIC)}")
    for length in lengths:
        for count in counts:
            SYNTHETIC[layout](length, count, 0)


def _weights(folder: Path | None, seed: int | None, width: int | None, device: torch.device, block: bool) -> Weights:
    from samebits.models.minimax_h3 import geometry
    from samebits.models.minimax_h3 import weights as loading

    if folder is not None or (seed is None and width is None and os.environ.get(loading.VARIABLE)):
        return loading.prepared(folder, block=block)
    chosen = width or (WIDTH_ON_CPU if device.type == "cpu" else geometry.OFFICIAL.hidden_size)
    return loading.synthetic(seed or 0, geometry.reduced(chosen), block=block, device=device)


def _clock(device: torch.device) -> Clock | None:
    """What times the stages; without the memory for it the replay goes on, and says so."""
    from samebits.models.minimax_h3 import latency

    try:
        return latency.clock(device)
    except RuntimeError as error:
        typer.echo(f"samebits replay: no latencies: {error}", err=True)
        return None


def _show(result: Replay, console: Console) -> None:
    from samebits.report.replays import case_tables, summary
    from samebits.report.terminal import rich_table

    content = result.to_json()
    console.print(f"[bold]{result.model}, {result.stage}[/bold]: {result.geometry}, {result.device}", highlight=False)
    console.print(f"weights: {result.weights}; beside {result.peer}", highlight=False)
    for case in content["cases"]:
        for table in case_tables(case):
            console.print(rich_table(table))
    for table in reversed(summary(content)):
        console.print(rich_table(table))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar where a person watches; nothing in a log."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("replaying", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
