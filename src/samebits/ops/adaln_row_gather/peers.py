"""What ``adaln_row_gather`` is compared with: the model's own operations."""

from __future__ import annotations

from torch import Tensor

from samebits.bench.peers import Peer


def diffusers(table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Six selections from the chunks of the table; their backward adds with atomics, in the dtype of the table."""
    return tuple(chunk.index_select(0, index) for chunk in table.unbind(1))


PEERS = (
    Peer("diffusers eager", diffusers),
    Peer("torch.compile", diffusers, compiled=True),
)
