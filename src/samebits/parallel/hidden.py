"""Residual streams whose hidden columns are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, ctx.width = group, local.shape[-1]
        parts = [
            torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, dist.get_rank(ctx.group) * ctx.width, ctx.width), None


def gather_hidden(local: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """(..., D / ranks) on each rank to (..., D) on all of them, rank r holding columns r * D / ranks onwards.

    Every operator that sums over D needs all of D on one rank: partial sums of shards are other bits. Each rank then computes
    the same whole result, so the gradient that comes back is whole on each rank, and this rank's columns are taken from it;
    nothing is summed over the group.
    """
    whole: Tensor = _Gather.apply(local, group)
    return whole
