"""A whole transformer to try things on: the real class, small or reduced in depth, with seeded weights and a real layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.minimax_h3 import known
from samebits.models.minimax_h3.layouts import named
from samebits.models.minimax_h3.patching import to_bfloat16

SMALL: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 64, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1,
    "ffn_dim": 48, "in_channels": 4, "audio_in_channels": 6, "patch_size": (1, 2, 2), "text_dim": 16, "freq_dim": 16,
    "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 8,
}  # fmt: skip
"""A configuration for CPUs; heads have the least channels that the attention takes."""
RELEASED: dict[str, Any] = {
    "num_attention_heads": 56, "attention_head_dim": 128, "hidden_size": 5376, "num_refiner_layers": 2, "ffn_dim": 14336,
    "in_channels": 24, "audio_in_channels": 32, "text_dim": 5120, "freq_dim": 256, "time_embed_hidden_dim": 5376,
    "time_embed_dim": 2688, "rope_freq_dim": 16,
}  # fmt: skip
"""The released sizes but for the number of blocks."""
PER_ROW = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
"""Arguments with a batch of sequences; all others are shared by it."""


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    inputs: dict[str, Any]

    @torch.no_grad()
    def __call__(self, **changes: Any) -> tuple[Tensor, ...]:
        """Velocities of video and audio rows."""
        made: tuple[Tensor, ...] = self.model(**self.inputs | changes)
        return made

    def alone(self, item: int) -> dict[str, Tensor]:
        """The arguments that make one sequence of the batch the only one."""
        return {name: self.inputs[name][item : item + 1] for name in PER_ROW}


def build(seed: int = 0, device: str = "cpu", **changes: Any) -> nn.Module:
    """The class itself, ``SMALL`` but for ``changes``, all in FP32."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):  # what the class would draw is drawn anew
        model: nn.Module = known.home(known.MODEL)(**SMALL | changes)
    model.to_empty(device=device)
    model.rope = angles(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.25 * noise if gain else noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def angles(model: Any, device: str) -> nn.Module:
    """The module of the angles, whose frequencies are computed as it is made."""
    made: nn.Module = type(model.rope)(model.config.rope_freq_dim, model.config.rope_theta)
    return made.to(device)


def subject(layout: str = "mini", batch: int = 1, seed: int = 0, device: str = "cpu", **changes: Any) -> Subject:
    """A model in BF16 with its FP32 islands, and random rows in a named layout."""
    model = to_bfloat16(build(seed, device, **changes))
    return Subject(model, rows(model.config, layout, batch, seed, device))


def rows(config: Any, layout: str, batch: int, seed: int, device: str) -> dict[str, Any]:
    """Arguments of a model of this configuration: random rows in a named layout, from torch's CPU generator."""
    packed, timestep, indices = named(layout)
    generator = torch.Generator().manual_seed(seed + 1)
    patch = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
    widths = (config.in_channels * patch, config.audio_in_channels, config.text_dim)
    places = (packed.video_indices, packed.audio_indices, packed.text_indices)
    drawn = {
        name: torch.randn(batch, len(where), width, generator=generator)
        for name, where, width in zip(PER_ROW, places, widths, strict=True)
    }
    shared = {
        "timestep": timestep,
        "timestep_indices": indices,
        "token_tags": packed.token_tags,
        "position_ids": packed.position_ids,
        **dict(zip(("video_indices", "audio_indices", "text_indices"), places, strict=True)),
    }
    return {name: value.to(device) for name, value in (drawn | shared).items()} | {"return_dict": False}
