"""What ``timestep_sinusoid`` is compared with. The frequencies are given, as a module keeps them or makes them on the spot."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.peers import Peer


def op_by_op(timestep: Tensor, frequencies: Tensor) -> tuple[Tensor]:
    """As diffusers writes it: sines, cosines, and a copy that swaps the halves."""
    half = frequencies.shape[0]
    argument = timestep[:, None].float() * frequencies[None, :]
    features = torch.cat([torch.sin(argument), torch.cos(argument)], dim=-1)
    return (torch.cat([features[:, half:], features[:, :half]], dim=-1),)


PEERS = (
    Peer("diffusers", op_by_op),
    Peer("torch.compile", op_by_op, compiled=True),
)
