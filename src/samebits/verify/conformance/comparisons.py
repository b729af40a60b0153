"""Many comparisons, and one wait for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.exact.bits import bits
from samebits.verify.conformance.base import assert_all_same

HELD = 2**29
"""Bytes of tensors that may wait for their verdict."""


class Comparisons:
    """Results that must have the same bits. On a GPU they are compared where they are, and the verdict is read at the end.

    A process that asks after each of some thousand comparisons waits for the GPU most of its time, and more so where other
    processes use it.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[dict[str, Tensor], dict[str, Tensor], str]] = []
        self._verdicts: list[Tensor] = []

    def add(self, left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
        """AssertionError at once where it costs nothing to know, else from :meth:`settle`."""
        kinds = [{n: (v.shape, v.dtype) for n, v in side.items()} for side in (left, right)]
        if kinds[0] != kinds[1] or not all(v.is_cuda for v in left.values()):
            assert_all_same(left, right, what)
            return
        self._waiting.append((left, right, what))
        self._verdicts.append(torch.stack([(bits(left[n]) != bits(right[n])).any() for n in left]).any())
        if sum(value.nbytes for _, side, _ in self._waiting for value in side.values()) > HELD:
            self.settle()

    def settle(self) -> None:
        """AssertionError, with the first difference, unless all that was added has the same bits."""
        differ = torch.stack(self._verdicts).tolist() if self._verdicts else []
        waiting, self._waiting, self._verdicts = self._waiting, [], []
        for wrong, sides in zip(differ, waiting, strict=True):
            if wrong:
                assert_all_same(*sides)
