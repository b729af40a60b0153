"""Which row of a modulation table a position uses: its timestep and its modality."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.segmentation import refuse_outside

MODALITIES = 3
"""Video 0, text 1, audio 2."""


def adaln_indices(timestep_indices: Tensor, token_tags: Tensor, num_timesteps: int) -> Tensor:
    """The table row of each position: ``timestep_indices * 3 + token_tags``, as MiniMax-H3 numbers its modulations.

    Args:
        timestep_indices: (S,) int64 or int32, values 0 .. ``num_timesteps`` - 1.
        token_tags: (S,) in the same dtype, values 0 (video), 1 (text) or 2 (audio).
        num_timesteps: distinct timesteps of the sequence; the table has three times as many rows.

    Returns:
        (S,) int64. Both values are checked before they are multiplied, so that none can wrap into the table. The check waits
        for the device; during graph capture and under ``torch.compile`` nothing may wait, and a wrong value gives -1, which
        every operator with a table refuses.

    Raises:
        TypeError: an argument is not a tensor of such a dtype, or num_timesteps no integer.
        ValueError: shapes or devices differ, or num_timesteps is below 1.
        IndexError: a timestep index or a tag outside its range.

    Source: diffusers 0.42.1, ``MiniMaxH3Transformer3DModel``.
    """
    if isinstance(num_timesteps, bool) or not isinstance(num_timesteps, int):
        raise TypeError(f"adaln_indices: num_timesteps must be an integer, not {num_timesteps!r}")
    if num_timesteps < 1:
        raise ValueError(f"adaln_indices: num_timesteps must be at least 1, got {num_timesteps}")
    given = (("timestep_indices", timestep_indices, num_timesteps), ("token_tags", token_tags, MODALITIES))
    for name, values, _ in given:
        if not isinstance(values, Tensor):
            raise TypeError(f"adaln_indices: {name} must be a torch.Tensor, not {type(values).__name__}")
        if values.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"adaln_indices: {name} has dtype {values.dtype}, expected torch.int64 or torch.int32; cast it explicitly"
            )
        if values.dim() != 1:
            raise ValueError(f"adaln_indices: {name} has shape {tuple(values.shape)}, expected (S,)")
    if timestep_indices.dtype != token_tags.dtype:
        kinds = f"{timestep_indices.dtype} and {token_tags.dtype}"
        raise TypeError(f"adaln_indices: timestep_indices and token_tags have dtypes {kinds}; they must agree")
    if timestep_indices.shape != token_tags.shape:
        shapes = f"{tuple(timestep_indices.shape)} and {tuple(token_tags.shape)}"
        raise ValueError(f"adaln_indices: timestep_indices and token_tags have shapes {shapes}; they must agree")
    if timestep_indices.device != token_tags.device:
        devices = f"{timestep_indices.device} and {token_tags.device}"
        raise ValueError(f"adaln_indices: timestep_indices and token_tags are on {devices}; they must agree")
    timestep, tag = timestep_indices.long(), token_tags.long()
    if not _may_wait(timestep_indices):
        valid = (timestep >= 0) & (timestep < num_timesteps) & (tag >= 0) & (tag < MODALITIES)
        return torch.where(valid, timestep * MODALITIES + tag, -1)
    for name, values, limit in given:
        refuse_outside(values, limit, f"adaln_indices: {name}")
    return timestep * MODALITIES + tag


def _may_wait(values: Tensor) -> bool:
    if torch.compiler.is_compiling() or values.device.type == "meta":
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())
