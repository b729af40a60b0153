"""A short generation by the pipeline of diffusers: its layout, its two schedules and its denoising loop around one transformer.

Only what would need other networks is stood in for: the features of the text and the latents of keyframes are random numbers.
The loop makes one sequence; neighbours are put beside it in the batch as it calls the transformer, and taken out behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.minimax_h3 import layouts
from samebits.models.minimax_h3.subject import PER_ROW

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
"""Of the two schedules of the released model."""
PIXELS = 16
"""Along each side of a latent."""
LAYOUT = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
"""Fields by which the pipeline describes the sequence to the transformer."""


@dataclass(frozen=True)
class Request:
    """What is generated: the sizes of a named layout; its soundtrack has as many latents as the pipeline gives so many frames."""

    layout: str = "mini"
    steps: int = 3
    """Calls of the transformer."""
    seed: int = 0
    """Of text features, keyframe latents and noise, all from CPU generators."""

    def __post_init__(self) -> None:
        if self.layout not in layouts.NAMED:
            raise ValueError(f"no layout named {self.layout!r}; choose one of {', '.join(layouts.NAMED)}")
        if self.steps < 1:
            raise ValueError(f"{self.steps} steps: expected at least 1")

    @property
    def sizes(self) -> layouts.Request:
        return layouts.NAMED[self.layout]

    @property
    def frames(self) -> int:
        """Of the video: 17 for every five latent frames, and five for the last two."""
        return (self.sizes.latent_frames - 2) // 5 * 17 + 5

    def draw(self, stream: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * self.seed + stream))


@dataclass(frozen=True)
class Step:
    given: dict[str, Any]
    """Arguments of the transformer, for the one sequence that is generated."""
    velocities: tuple[Tensor, Tensor]
    """Of its video and audio rows, as the transformer gave them."""

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """(1, Nv, C) and (1, Na, C): the latents before the step, conditions first."""
        return self.given[PER_ROW[0]], self.given[PER_ROW[1]]


@dataclass
class Generation:
    layout: dict[str, Tensor]
    text: Tensor
    conditions: Tensor
    """Rows of the keyframes, noised as the pipeline does."""
    sigmas: tuple[list[float], list[float]]
    """Of video and audio, from one to zero."""
    result: tuple[Tensor, Tensor]
    """Latents of the video (1, C, T, H, W) and of the soundtrack (channels, C, N)."""
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Beside:
    """Other sequences in the batch, and the place of the one that is generated."""

    neighbours: int = 0
    place: int = 0


ALONE = Beside()


@functools.cache
def pipeline_class() -> Any:
    """The pipeline, without its lower limit of five seconds: a short video needs the same code.

    Raises:
        ImportError: diffusers or, for its loaders, transformers is missing.
    """
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ModularPipeline

    return type("ShortMiniMaxH3ModularPipeline", (MiniMaxH3ModularPipeline,), {"min_duration": 0.0})


@torch.no_grad()
def generate(model: nn.Module, request: Request, beside: Beside = ALONE) -> Generation:
    """Run the pipeline's own blocks, from the layout to the latents behind the last step, on the device of ``model``.

    The width of the text is the model's; its video and audio channels must be the pipeline's, 24 and 32.
    """
    from diffusers import MiniMaxH3Scheduler
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3FL2VACoreDenoiseStep

    config: Any = model.config
    device = next(model.parameters()).device
    sizes = request.sizes
    pipeline = pipeline_class()(MiniMaxH3FL2VACoreDenoiseStep())
    schedules = MiniMaxH3Scheduler(shift=VIDEO_SHIFT), MiniMaxH3Scheduler(shift=AUDIO_SHIFT)
    pipeline.update_components(transformer=model, scheduler=schedules[0], audio_scheduler=schedules[1])
    pipeline.set_progress_bar_config(disable=True)
    text = request.draw(1, 1, sizes.text, config.text_dim).to(device)
    picture = (1, config.in_channels, 1, sizes.latent_height, sizes.latent_width)
    with _watched(model, request, beside) as steps:
        state = pipeline(
            text_token_tags=torch.full((sizes.text,), layouts.TEXT),
            prompt_embeds=text,
            height=sizes.latent_height * PIXELS,
            width=sizes.latent_width * PIXELS,
            num_frames=request.frames,
            keyframe_anchors=sizes.anchors,
            condition_latents=[request.draw(2 + at, *picture).to(device) for at in range(len(sizes.anchors))],
            num_inference_steps=request.steps + 1,
            generator=torch.Generator().manual_seed(request.seed),
        )
    return Generation(
        layout={name: state.get(name) for name in LAYOUT},
        text=text,
        conditions=state.get("condition_rows"),
        sigmas=(schedules[0].sigmas.tolist(), schedules[1].sigmas.tolist()),
        result=(state.get("latents"), state.get("audio_latents")),
        steps=steps,
    )


@contextmanager
def _watched(model: nn.Module, request: Request, beside: Beside) -> Iterator[list[Step]]:
    """Every call of the transformer; in the batch of each, neighbours around the one sequence that it is called with."""
    steps: list[Step] = []
    asked: list[dict[str, Any]] = []
    place = beside.place

    def before(module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # the loop writes its latents in place
        asked.append({name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()})
        return arguments, given | {name: _among(given[name], request, beside, at) for at, name in enumerate(PER_ROW)}

    def after(module: nn.Module, arguments: Any, given: Any, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        video, audio = (value[place : place + 1].contiguous() for value in outputs)
        steps.append(Step(asked.pop(), (video, audio)))
        return video, audio

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def _among(rows: Tensor, request: Request, beside: Beside, kind: int) -> Tensor:
    others = [request.draw(100 + len(PER_ROW) * at + kind, *rows.shape).to(rows) for at in range(beside.neighbours)]
    return torch.cat([*others[: beside.place], rows, *others[beside.place :]])
