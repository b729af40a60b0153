"""The angles of positions on three axes: frame, height and width of a packed sequence."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from samebits.exact import elementary

AXES = 3


@functools.cache
def _frequencies(per_axis: int, theta: float) -> Tensor:
    """theta ** -(2 j / (2 F)), j = 0 .. F - 1, FP32, on the CPU, where the model makes them too."""
    exponents = torch.arange(0, 2 * per_axis, 2, dtype=torch.float32, device="cpu") / (2 * per_axis)
    return 1.0 / (theta**exponents)


def rope_3axis_tables(position_ids: Tensor, *, frequencies: int = 16, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for :func:`samebits.rope_3axis`, with the bits of diffusers' ``MiniMaxH3RotaryPosEmbed``.

    Args:
        position_ids: (S, 3) coordinates t, h, w of each position, of any real dtype; rounded to FP32 first.
        frequencies: F of each axis, at least 1; columns 0 .. F - 1 are those of t, then h, then w.
        theta: base of the frequencies, above 0.

    Returns:
        cos and sin (S, 6 F) FP32, on the device of position_ids: 3 F angles, twice. Frequencies are made on the CPU, cosines
        and sines by the device.

    Raises:
        TypeError: position_ids is no tensor of real numbers, or frequencies is no integer.
        ValueError: a shape, a count or theta is not accepted.

    Source: diffusers' ``MiniMaxH3RotaryPosEmbed``.
    """
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"rope_3axis_tables: position_ids must be a torch.Tensor, not {type(position_ids).__name__}")
    if position_ids.dtype == torch.bool or position_ids.is_complex():
        raise TypeError(f"rope_3axis_tables: position_ids has dtype {position_ids.dtype}, expected a real number type")
    if position_ids.dim() != 2 or position_ids.shape[1] != AXES:
        raise ValueError(f"rope_3axis_tables: position_ids has shape {tuple(position_ids.shape)}, expected (S, 3)")
    if isinstance(frequencies, bool) or not isinstance(frequencies, int):
        raise TypeError(f"rope_3axis_tables: frequencies must be an integer, not {frequencies!r}")
    if frequencies < 1:
        raise ValueError(f"rope_3axis_tables: frequencies must be at least 1, got {frequencies}")
    if not 0.0 < theta < float("inf"):
        raise ValueError(f"rope_3axis_tables: theta must be finite and above 0, got {theta}")
    by = _frequencies(frequencies, float(theta)).to(position_ids.device)
    angles = (position_ids.to(torch.float32)[:, :, None] * by).flatten(1)  # t, then h, then w
    angles = torch.cat((angles, angles), dim=-1)
    return elementary.cos(angles), elementary.sin(angles)
