"""A gradient chain that runs through the ranks of a group: modules, autograd and token shards together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.dispatch import UnsupportedError
from samebits.nn.chain import GradientChain


class RankChain(GradientChain):
    """:class:`samebits.nn.GradientChain` over contiguous token shards: rank r continues the folds of rank r - 1.

    Every rank runs one forward and one backward inside ``with chain:`` on its own tokens (rank 0 holds the first ones), then
    :meth:`finish`, which gives every rank the gradients of the whole batch, bytes as from one rank. A rank waits for the one
    before it parameter by parameter, so the backward passes run one layer behind each other.

    Args:
        parameters: as for :class:`samebits.nn.GradientChain`, in the same order on every rank.
        group: the ranks; None: the default group.
    """

    def __init__(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
        super().__init__(parameters)
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._taken: set[int] = set()

    def take(self, parameter: Tensor) -> Tensor | None:
        if id(parameter) in self._taken:
            raise UnsupportedError(
                "a chain over ranks takes one backward per rank: the tokens of a second one lie behind those of later ranks"
            )
        self._taken.add(id(parameter))
        if self._rank == 0:
            return super().take(parameter)
        start = self._empty(parameter)
        dist.recv(start, group=self._group, group_src=self._rank - 1)
        return start

    def put(self, parameter: Tensor, value: Tensor) -> None:
        super().put(parameter, value)
        if self._rank + 1 < self._world:
            dist.send(value.contiguous(), group=self._group, group_dst=self._rank + 1)

    def finish(self) -> None:
        """Give every rank the end of the chain, then write ``.grad``."""
        for slot in self._slots.values():
            if id(slot.parameter) not in self._taken:
                continue
            if self._rank + 1 < self._world or slot.buffer is None:
                slot.buffer = self._empty(slot.parameter)
            slot.buffer = slot.buffer.contiguous()
            dist.broadcast(slot.buffer, group=self._group, group_src=self._world - 1)
        super().finish()

    def _empty(self, parameter: Tensor) -> Tensor:
        segments = self._slots[id(parameter)].segments
        shape = parameter.shape if segments is None else (sum(segments),)
        return torch.empty(shape, dtype=torch.float32, device=parameter.device)
