"""Video latents to rows of patches and back: the order in which rows stand and in which a row holds its numbers.

Rows go by time, then height, then width; a row holds its patch by channel, then time, height and width. Values are moved, never
changed. Source: the MiniMax-H3 pipeline of diffusers 0.42.1 (``patchify_video_latents`` and the video decoder).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from samebits.models.minimax_h3.layouts import PATCH


def pack_video(latents: Tensor, patch: Sequence[int] = PATCH) -> Tensor:
    """(B, C, T, H, W) to (B * patches, C * numbers of a patch), contiguous.

    Raises:
        ValueError: the shape has not five axes, or T, H, W are no multiples of the patch.
    """
    if latents.dim() != 5:
        raise ValueError(f"latents have shape {tuple(latents.shape)}, expected (B, C, T, H, W)")
    count = _patches(latents.shape[2:], patch)
    cut = (
        latents.unflatten(4, (count[2], patch[2])).unflatten(3, (count[1], patch[1])).unflatten(2, (count[0], patch[0]))
    )
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(0, 3).contiguous()


def unpack_video(rows: Tensor, size: Sequence[int], patch: Sequence[int] = PATCH) -> Tensor:
    """The inverse: (B * patches, C * numbers of a patch) to (B, C, T, H, W), contiguous. ``size``: (T, H, W) of the latents.

    Raises:
        ValueError: the rows are not whole latents of that size, their columns not whole patches, or the size no multiple of
            the patch.
    """
    count, numbers = _patches(size, patch), patch[0] * patch[1] * patch[2]
    frames = count[0] * count[1] * count[2]
    if rows.dim() != 2 or frames == 0 or rows.shape[0] % frames or rows.shape[1] % numbers:
        raise ValueError(f"rows have shape {tuple(rows.shape)}, expected (B * {frames}, C * {numbers})")
    cut = rows.unflatten(1, (rows.shape[1] // numbers, *patch)).unflatten(0, (rows.shape[0] // frames, *count))
    return cut.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3).contiguous()


def _patches(size: Sequence[int], patch: Sequence[int]) -> tuple[int, int, int]:
    """How many patches lie along each axis."""
    if (
        len(size) != 3
        or len(patch) != 3
        or any(step < 1 or whole % step for whole, step in zip(size, patch, strict=True))
    ):
        raise ValueError(f"latents of {tuple(size)} (T, H, W) are not whole patches of {tuple(patch)}")
    return size[0] // patch[0], size[1] // patch[1], size[2] // patch[2]
