"""The generation gate: the patched transformer in the real pipeline, in several runs, and beside the class step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import generation_process, layouts, model_run, patching, peer
from samebits.models.minimax_h3.generation import ALONE, LAYOUT, Beside, Generation, Request, Step, generate
from samebits.models.minimax_h3.generation_process import Order
from samebits.models.minimax_h3.generation_rules import check_generation
from samebits.models.minimax_h3.measure import Agreement, agreement
from samebits.models.minimax_h3.model_replay import Qualification, apart, qualified, rms
from samebits.models.minimax_h3.model_run import VELOCITIES, Made
from samebits.models.minimax_h3.model_source import Recipe, Source
from samebits.models.minimax_h3.record import exact_matmul
from samebits.models.minimax_h3.sealed import Sealed, first_difference, seal
from samebits.models.minimax_h3.subject import Subject

KIND = "minimax_h3_generation_replay"
BESIDE = {"the first of two": Beside(1, 0), "the second of three": Beside(2, 1)}
ELSEWHERE = {"another process, alone": ALONE, "another process, the second of two": Beside(1, 1)}
CONDITION = 0.999
"""The time at which the pipeline holds keyframes, unless the video is later."""


@dataclass(frozen=True)
class StepResult:
    """One step beside the class: running free, and given the latents that the class had (teacher-forced)."""

    step: int
    timesteps: tuple[float, ...]
    rows_apart: float | None
    """Largest distance of the latents before the step over the class's largest magnitude, video or audio, as all below."""
    velocity_apart: float | None
    forced: Agreement
    forced_apart: float | None
    """Of the velocity for the class's latents: what this one step adds."""
    rms: float | None
    """Of that velocity from the class in FP64: root of the mean square over the golden's."""
    peer_rms: float | None


@dataclass(frozen=True)
class Place:
    """A boundary of the first step, for the same noise."""

    name: str
    chained: Agreement
    apart: float | None


@dataclass(frozen=True)
class GenerationCase:
    title: str
    request: Request
    seq_len: int
    sites: tuple[str, ...]
    unused: tuple[str, ...]
    record: Sealed
    """The sealed record of the patched model, alone in the batch."""
    layout: dict[str, bool]
    """Field of the pipeline's layout and timesteps to whether our own packing has its bits."""
    runs: dict[str, str | None]
    """Other runs of the patched model to where each first differs; None: nowhere."""
    peer_runs: dict[str, str | None]
    restored: str | None
    """Where the model, unpatched again, first differs from what it made before."""
    earlier: tuple[str | None, ...]
    """Where an earlier sealed record first differs; empty where none was given."""
    steps: tuple[StepResult, ...]
    first_step: tuple[Place, ...]
    psnr: float | None
    """Of the final video latents beside the class's, in dB, for the class's largest magnitude; None: the same bits."""
    first_drift: str | None
    """Where the sealed record first differs from the class's."""

    @property
    def first_step_drift(self) -> str | None:
        """The first boundary of the first step that leaves the class."""
        return next((place.name for place in self.first_step if not place.chained.same), None)


def replay_generation(
    recipe: Recipe,
    request: Request,
    *,
    contracts: Mapping[str, str] | None = None,
    backend: str | None = None,
    earlier: Sealed | None = None,
    elsewhere: Callable[[Order], list[Sealed]] = generation_process.elsewhere,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Qualification:
    """Generate with and without our operators; again, beside other sequences, and in another process.

    The other process goes first and ends before the model is built here: a device holds it once.

    Args:
        contracts, backend: as ``samebits.patch`` takes them.
        earlier: a sealed record that must come out again.
        elsewhere: runs an order in another process.
        progress: told (parts done, parts, the part that begins).

    Raises:
        ValueError, TypeError, RuntimeError: a model that cannot be built or patched.
        ChildProcessError: the other process failed.
    """
    chosen = patching.resolve(contracts or {})
    progress(0, 3, "another process")
    others = elsewhere(Order(recipe, request, tuple(ELSEWHERE.values()), chosen, backend))
    progress(1, 3, "the class")
    source = recipe.build()
    with exact_matmul(), torch.no_grad():
        case, used = _case(source, request, chosen, backend, earlier, others, lambda: progress(2, 3, "patched"))
    return qualified(KIND, "generation", source, used, [case], check_generation([case]))


def _case(
    source: Source,
    request: Request,
    contracts: dict[str, str],
    backend: str | None,
    earlier: Sealed | None,
    others: list[Sealed],
    patched: Callable[[], None],
) -> tuple[GenerationCase, dict[str, str]]:
    model, weights = source.model, source.digest()
    used: dict[str, str] = {}

    def sealed(made: Generation) -> Sealed:
        return seal(made, request, weights, used, peer.version())

    def made_again(record: Sealed) -> dict[str, str | None]:
        runs = {"a second run": ALONE, **BESIDE}
        return {name: first_difference(record, sealed(generate(model, request, way))) for name, way in runs.items()}

    theirs = generate(model, request)
    golden = [model_run.exact(Subject(model, step.given)) for step in theirs.steps]
    peer_runs = made_again(sealed(theirs))
    start = model_run.run(Subject(model, theirs.steps[0].given)).made
    patched()
    patching.patch(model, contracts, backend=backend)
    try:
        ours = generate(model, request)
        report = patching.patched(model)
        used |= report.contracts
        record = sealed(ours)
        runs = made_again(record)
        forced = [model(**step.given) for step in theirs.steps]
        own_start = model_run.run(Subject(model, theirs.steps[0].given)).made
    finally:
        patching.unpatch(model)
    runs |= {name: first_difference(record, made) for name, made in zip(ELSEWHERE, others, strict=True)}
    case = GenerationCase(
        title=f"{request.layout}, S = {len(ours.layout['token_tags'])}, {request.steps} steps",
        request=request,
        seq_len=len(ours.layout["token_tags"]),
        sites=tuple(site.name for site in report.sites),
        unused=report.unused,
        record=record,
        layout=_layout(ours, request),
        runs=runs,
        peer_runs=peer_runs,
        restored=first_difference(sealed(theirs), sealed(generate(model, request))),
        earlier=() if earlier is None else (first_difference(earlier, record),),
        steps=tuple(
            _step(at, *both) for at, both in enumerate(zip(ours.steps, theirs.steps, forced, golden, strict=True))
        ),
        first_step=tuple(
            Place(name, agreement((value,), (start[name],)), apart(value, start[name]))
            for name, value in own_start.items()
        ),
        psnr=_psnr(ours.result[0], theirs.result[0]),
        first_drift=first_difference(record, sealed(theirs)),
    )
    return case, used


def _step(at: int, ours: Step, theirs: Step, forced: tuple[Tensor, Tensor], golden: Made) -> StepResult:
    true = [golden[name] for name in VELOCITIES]
    return StepResult(
        step=at,
        timesteps=tuple(theirs.given["timestep"].tolist()),
        rows_apart=_worst(ours.rows, theirs.rows),
        velocity_apart=_worst(ours.velocities, theirs.velocities),
        forced=agreement(forced, theirs.velocities),
        forced_apart=_worst(forced, theirs.velocities),
        rms=_worst(forced, true, rms),
        peer_rms=_worst(theirs.velocities, true, rms),
    )


def _worst(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], distance: Callable[[Tensor, Tensor], float | None] = apart
) -> float | None:
    found = [distance(one, other) for one, other in zip(ours, theirs, strict=True)]
    return None if None in found else max(value for value in found if value is not None)


def _layout(made: Generation, request: Request) -> dict[str, bool]:
    """The pipeline's layout and timesteps beside those of :mod:`layouts`, which shares no code with it."""
    sizes = request.sizes
    latents = len(made.layout["audio_indices"]) // layouts.AUDIO_CHANNELS
    frame = (sizes.latent_frames, sizes.latent_height, sizes.latent_width)
    packed = layouts.pack([layouts.TEXT] * sizes.text, *frame, latents, sizes.anchors)
    held = {name: same_bits(made.layout[name].cpu(), getattr(packed, name)) for name in LAYOUT}
    video, audio = ((1 - torch.tensor(sigmas)).tolist() for sigmas in made.sigmas)
    for at, step in enumerate(made.steps):
        distinct, index = layouts.row_timesteps(packed, video[at], audio[at], max(video[at], CONDITION))
        given = step.given["timestep"].cpu(), step.given["timestep_indices"].cpu()
        held[f"timesteps of step {at}"] = same_bits(given[0], distinct) and same_bits(given[1], index)
    return held


def _psnr(ours: Tensor, theirs: Tensor) -> float | None:
    mean = float((ours.double() - theirs.double()).square().mean())
    peak = float(theirs.double().abs().max())
    return 10 * math.log10(peak**2 / mean) if mean and math.isfinite(mean) and peak else None
