"""One left fold over tokens that several ranks hold: the accumulator travels, the tokens stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.dispatch import UnsupportedError
from samebits.parallel.order import Chunk, TokenOrder

Fold = Callable[[Chunk, Sequence[Tensor] | None], Sequence[Tensor]]
"""(chunk, accumulators or None) to the accumulators after the chunk."""


def carry(
    order: TokenOrder, fold: Fold, like: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Continue one fold through all chunks in the order of the tokens; every rank gets the end of it.

    Args:
        order: all chunks of the batch, the same on every rank.
        fold: computes this rank's chunks. The first chunk of the batch gets None.
        like: shapes, dtypes and device of the accumulators (values are not read).
        group: the ranks of ``order``; None: the default group.

    Returns:
        The accumulators after the last chunk, on every rank, the bytes of one rank folding the whole batch.

    Raises:
        UnsupportedError: the group has no rank that ``order`` names, or a rank of the group holds nothing in it.
    """
    world, me = dist.get_world_size(group), dist.get_rank(group)
    named = {chunk.rank for chunk in order.chunks}
    if named != set(range(world)):
        raise UnsupportedError(f"the token order names ranks {sorted(named)}, but the group has ranks 0 .. {world - 1}")
    held: list[Tensor] | None = None
    for index, chunk in enumerate(order.chunks):
        before = order.chunks[index - 1].rank if index else None
        if chunk.rank == me:
            if before is not None and before != me:
                held = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]
                for tensor in held:
                    dist.recv(tensor, group=group, group_src=before)
            held = [value.contiguous() for value in fold(chunk, held)]
        elif before == me and held is not None:
            for tensor in held:
                dist.send(tensor, group=group, group_dst=chunk.rank)
    last = order.chunks[-1].rank
    if me != last or held is None:
        held = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]
    for tensor in held:
        dist.broadcast(tensor, group=group, group_src=last)
    return held
