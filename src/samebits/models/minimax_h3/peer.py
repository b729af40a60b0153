"""The installed diffusers itself, stage by stage: its modules and its own ``forward`` code, fed with given tensors.

Same signatures as ``provider``. Modules are built without memory (on the meta device) and called with the tensors in place
of their parameters, so gradients reach those tensors. The norm in front of attention and the gated residual behind it are
lines inside ``MiniMaxH3TransformerBlock.forward``: for them the real block runs with stand-ins for its attention, FFN and
projection, and what passes between its lines is caught.

diffusers is imported at the first use, never before (it takes seconds).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from samebits.models.minimax_h3.geometry import CHUNKS, EPS
from samebits.models.minimax_h3.layouts import AUDIO, AUDIO_CHANNELS, PATCH, VIDEO, Packed, Reference

VERIFIED = {"92d665e9fa10b1417088341dce5977663a180f9e6fa404fb9330062f353fe7ef": "0.42.1"}
"""SHA-256 of the model's source file to the release in which ``provider`` was compared with it."""


def missing() -> str | None:
    """Why diffusers cannot be used here, or None."""
    try:
        modeling()
    except ImportError as error:
        return f"{error}; pip install 'diffusers==0.42.1'"
    return None


@functools.cache
def modeling() -> ModuleType:
    """The module of the model's classes.

    Raises:
        ImportError: diffusers is missing, or too old to have the model.
    """
    from diffusers.models.transformers import transformer_minimax_h3

    return transformer_minimax_h3


def version() -> str:
    """The release, and whether its model file is the one that was compared."""
    import diffusers

    digest = source_digest()
    known = "the source that was compared" if digest in VERIFIED else f"not compared before: source {digest[:16]}"
    return f"diffusers {diffusers.__version__} ({known})"


def source_digest() -> str:
    return hashlib.sha256(Path(str(modeling().__file__)).read_bytes()).hexdigest()


# --- stages -----------------------------------------------------------------------------------------------------------


def timestep_sinusoid(timestep: Tensor, num_channels: int = 256) -> Tensor:
    return _call(_time_proj(num_channels), {}, timestep)


def timestep_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    module = _time_embedder(w1.shape[1], w1.shape[0], w2.shape[0])
    parameters = {"linear_1.weight": w1, "linear_1.bias": b1, "linear_2.weight": w2, "linear_2.bias": b2}
    return _call(module, parameters, x)


def adaln_projection(temb: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The module returns six chunks of one table; side by side again they are that table.
    chunks = _projected(temb, weight, bias)
    return torch.cat(chunks, dim=-1).view(temb.shape[0], -1)


def adaln_row_gather(table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    return tuple(chunk.index_select(0, index) for chunk in table.chunk(CHUNKS, dim=-1))


def adaln_modulation(temb: Tensor, weight: Tensor, bias: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    return tuple(chunk.index_select(0, index) for chunk in _projected(temb, weight, bias))


def rmsnorm_modulated(
    x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float = EPS
) -> Tensor:
    caught = _through_block(x, weight, (shift, scale, shift), index, eps, sublayer=None)
    return caught.attention_input


def adaln_gate_residual(residual: Tensor, y: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    ones = torch.ones(residual.shape[-1], dtype=residual.dtype, device=residual.device)
    return _through_block(residual, ones, (gate, gate, gate), index, EPS, sublayer=y).residual


def final_adaln_out(
    x: Tensor,
    norm_weight: Tensor,
    temb: Tensor,
    weight: Tensor,
    bias: Tensor,
    timestep_indices: Tensor,
    eps: float = EPS,
) -> Tensor:
    module = _norm_out(x.shape[-1], weight.shape[1], eps)
    parameters = {"norm.weight": norm_weight, "linear.weight": weight, "linear.bias": bias}
    return _call(module, parameters, x, temb, timestep_indices)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    made: Tensor = _call(_linear(weight.shape[1], weight.shape[0], bias is not None), given, x)
    return made


def qk_rmsnorm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    made: Tensor = _call(_norm(x.shape[-1], eps), {"weight": weight}, x)
    return made


def rope_3axis(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    made: Tensor = modeling()._apply_rotary_emb(x, cos, sin)
    return made


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # as MiniMaxH3AttnProcessor calls it
    made: Tensor = modeling().dispatch_attention_fn(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, backend=None, parallel_config=None
    )
    return made


def swiglu(x: Tensor) -> Tensor:
    from diffusers.models.activations import SwiGLU

    with torch.device("meta"):
        module = SwiGLU(1, 1, bias=False)
    module.proj = _StandIn(lambda given: given)
    made: Tensor = module(x)
    return made


# --- modules ----------------------------------------------------------------------------------------------------------


def _call(module: nn.Module, parameters: Mapping[str, Tensor], *inputs: Tensor) -> Any:
    return functional_call(module, dict(parameters), inputs, strict=bool(parameters))


def _projected(temb: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    module = _projection(weight.shape[1], weight.shape[0] // (3 * CHUNKS))
    chunks: tuple[Tensor, ...] = _call(module, {"linear.weight": weight, "linear.bias": bias}, temb)
    return chunks


@functools.cache
def _time_proj(num_channels: int) -> nn.Module:
    from diffusers.models.embeddings import Timesteps

    # as MiniMaxH3Transformer3DModel makes its time_proj
    return Timesteps(num_channels=num_channels, flip_sin_to_cos=True, downscale_freq_shift=0)


@functools.cache
def _time_embedder(channels: int, hidden: int, embed: int) -> nn.Module:
    from diffusers.models.embeddings import TimestepEmbedding

    with torch.device("meta"):
        return TimestepEmbedding(in_channels=channels, time_embed_dim=hidden, out_dim=embed)


@functools.cache
def _projection(time_embed: int, hidden: int) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = modeling().MiniMaxH3AdaLayerNormModulation(time_embed, hidden)
        return made


@functools.cache
def _linear(width: int, outputs: int, bias: bool) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(width, outputs, bias=bias)


@functools.cache
def _norm(width: int, eps: float) -> nn.Module:
    with torch.device("meta"):
        return nn.RMSNorm(width, eps=eps)


@functools.cache
def _norm_out(hidden: int, time_embed: int, eps: float) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = modeling().MiniMaxH3AdaLayerNormOut(hidden, time_embed, eps)
        return made


class _Caught(Exception):
    """The block has passed the last line of interest."""


class _StandIn(nn.Module):
    """Calls a function in place of a module of the block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def _through_block(
    hidden: Tensor,
    norm_weight: Tensor,
    chunks: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
    eps: float,
    sublayer: Tensor | None,
) -> SimpleNamespace:
    """The real block as far as asked: up to its attention, or with ``sublayer`` for attention's output up to ``norm2``."""
    caught = SimpleNamespace()

    def attention(normed: Tensor, *_: Any) -> Tensor:
        caught.attention_input = normed
        if sublayer is None:
            raise _Caught
        return sublayer

    def second_norm(residual: Tensor) -> Tensor:
        caught.residual = residual
        raise _Caught

    with torch.device("meta"):
        block = modeling().MiniMaxH3TransformerBlock(
            hidden_size=hidden.shape[-1],
            num_attention_heads=1,
            attention_head_dim=1,
            ffn_dim=1,
            time_embed_dim=1,
            norm_eps=eps,
            qk_norm_eps=eps,
        )
    block.adaln_proj = _StandIn(lambda _: (*chunks, *chunks))
    block.attn = _StandIn(attention)
    block.norm2 = _StandIn(second_norm)
    block.ff = _StandIn(lambda _: None)
    try:
        functional_call(block, {"norm1.weight": norm_weight}, (hidden, None, index, None), strict=True)
    except _Caught:
        return caught
    raise RuntimeError("MiniMaxH3TransformerBlock.forward no longer calls norm2 behind its attention")


# --- the pipeline's packing -------------------------------------------------------------------------------------------


def _packing() -> ModuleType:
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    return before_denoise


def pack(
    text_tags: Sequence[int],
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latents: int,
    anchors: Sequence[str] = (),
) -> Packed:
    """``layouts.pack`` by the pipeline's own function. Needs transformers beside diffusers."""
    step = _packing().MiniMaxH3PrepareLayoutStep
    sizes = (latent_frames, latent_height, latent_width, audio_latents)
    tags = torch.tensor(text_tags, dtype=torch.int64)
    return Packed(*step.build_packed_sequence(tags, *sizes, PATCH, AUDIO_CHANNELS, AUDIO, VIDEO, tuple(anchors)))


def pack_references(
    text_tags: Sequence[int],
    references: Sequence[Reference],
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latents: int,
) -> Packed:
    """``layouts.pack_references`` by the pipeline's own function."""
    step = _packing().MiniMaxH3Ref2VAPrepareLayoutStep
    visual = [
        torch.empty(1, 1, 1 if r.kind == "image" else r.latent_frames, r.latent_height, r.latent_width)
        for r in references
        if r.kind != "audio"
    ]
    heard = [torch.empty(r.audio_latents * AUDIO_CHANNELS, 1) for r in references if r.audio_latents]
    asked = [SimpleNamespace(kind=r.kind, has_audio=r.audio_latents > 0) for r in references]
    sizes = (latent_frames, latent_height, latent_width, audio_latents)
    tags = torch.tensor(text_tags, dtype=torch.int64)
    built = step.build_ref2va_packed_sequence(tags, asked, visual, heard, *sizes, PATCH, AUDIO_CHANNELS, AUDIO, VIDEO)
    return Packed(*built)


def row_timesteps(
    packed: Packed, video: float, audio: float, condition_video: float = 0.999, condition_audio: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``layouts.row_timesteps`` by the pipeline's own function."""
    step = _packing().MiniMaxH3SetTimestepsStep
    counts = (packed.condition_video_rows, packed.condition_audio_rows, len(packed.text_indices))
    values = (video, audio, condition_video, condition_audio)
    made: tuple[Tensor, Tensor] = step.build_row_timesteps(packed.video_indices, packed.audio_indices, *counts, *values)
    return made
