"""The sizes of the model that the conditioning chain and a block meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MODALITIES = 3
"""0 video, 1 text, 2 audio: the values of ``token_tags``."""
CHUNKS = 6
"""Of an AdaLN table row, in this order: shift, scale and gate of attention, then shift, scale and gate of the FFN."""
EPS = 1e-5
"""Of every norm of the model."""
DTYPE = torch.bfloat16
"""Of everything but the timestep embedder, which is FP32."""


@dataclass(frozen=True)
class Geometry:
    """Sizes; the defaults are the released model's."""

    hidden_size: int = 5376
    """H, the width of a packed row."""
    time_channels: int = 256
    """Sinusoidal features of one timestep: cosines, then sines."""
    time_hidden: int = 5376
    """Width between the two linears of the timestep embedder."""
    time_embed: int = 2688
    """D, the width of the timestep embedding (``temb``)."""
    heads: int = 56
    head_dim: int = 128
    ffn_dim: int = 14336
    """F, the width between the two linears of the feed-forward layer."""
    rope_frequencies: int = 16
    """Per axis; 6 times as many channels of a head are rotated."""

    @property
    def inner_dim(self) -> int:
        """All heads of q, side by side."""
        return self.heads * self.head_dim

    @property
    def official(self) -> bool:
        return self == OFFICIAL

    def __str__(self) -> str:
        return f"hidden_size {self.hidden_size}, time embedding {self.time_channels} -> {self.time_hidden} -> {self.time_embed}"

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Parameters of the chain by their name in the checkpoint: those of block 0, the timestep embedder and the norms."""
        h, d, f = self.hidden_size, self.time_embed, self.time_hidden
        table = MODALITIES * CHUNKS * h
        return {
            "time_embedder.linear_1.weight": (torch.float32, (f, self.time_channels)),
            "time_embedder.linear_1.bias": (torch.float32, (f,)),
            "time_embedder.linear_2.weight": (torch.float32, (d, f)),
            "time_embedder.linear_2.bias": (torch.float32, (d,)),
            "transformer_blocks.0.adaln_proj.linear.weight": (DTYPE, (table, d)),
            "transformer_blocks.0.adaln_proj.linear.bias": (DTYPE, (table,)),
            "transformer_blocks.0.norm1.weight": (DTYPE, (h,)),
            "transformer_blocks.0.norm2.weight": (DTYPE, (h,)),
            "token_refiner.final_norm.weight": (DTYPE, (h,)),
            "norm_out.norm.weight": (DTYPE, (h,)),
            "norm_out.linear.weight": (DTYPE, (2 * h, d)),
            "norm_out.linear.bias": (DTYPE, (2 * h,)),
        }

    def sublayer_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The parameters of attention and FFN of block 0, which the conditioning chain does not meet."""
        h, inner, f = self.hidden_size, self.inner_dim, self.ffn_dim
        shapes = {
            **{f"attn.to_{part}.weight": (inner, h) for part in "qkv"},
            **{f"attn.norm_{part}.weight": (self.head_dim,) for part in "qk"},
            "attn.to_out.0.weight": (h, inner),
            "ff.net.0.proj.weight": (2 * f, h),
            "ff.net.2.weight": (h, f),
        }
        return {f"transformer_blocks.0.{name}": (DTYPE, shape) for name, shape in shapes.items()}

    def block_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """All parameters that a replay of block 0 reads: the block's and the timestep embedder's."""
        kept = ("time_embedder.", "transformer_blocks.0.")
        return {name: s for name, s in self.shapes().items() if name.startswith(kept)} | self.sublayer_shapes()


OFFICIAL = Geometry()
STEP = 16
"""A reduced width is a multiple of it: half of it is the time embedding, and kernels want that in multiples of 8."""


def reduced(width: int) -> Geometry:
    """The model with residual width ``width``: everything else about in the released proportions, time features and heads in full.

    Raises:
        ValueError: not a positive multiple of 16, or wider than the released model.
    """
    if not 0 < width <= OFFICIAL.hidden_size or width % STEP:
        raise ValueError(f"width {width}: expected a multiple of {STEP} from {STEP} to {OFFICIAL.hidden_size}")
    heads = max(1, round(width * OFFICIAL.heads / OFFICIAL.hidden_size))
    ffn_dim = width * OFFICIAL.ffn_dim // OFFICIAL.hidden_size // STEP * STEP
    return Geometry(width, time_hidden=width, time_embed=width // 2, heads=heads, ffn_dim=ffn_dim)
