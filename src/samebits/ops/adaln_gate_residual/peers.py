"""What ``adaln_gate_residual`` is compared with: the model's own operations."""

from __future__ import annotations

from torch import Tensor

from samebits.bench.peers import Peer


def diffusers(residual: Tensor, y: Tensor, gate: Tensor, index: Tensor) -> tuple[Tensor]:
    """The gated addition as diffusers' MiniMaxH3TransformerBlock writes it."""
    return (residual + gate.index_select(0, index) * y,)


PEERS = (
    Peer("diffusers eager", diffusers),
    Peer("torch.compile", diffusers, compiled=True),
)
