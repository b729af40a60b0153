"""Steps 1 and 2 of the digest on a GPU, by a kernel of ours: what it is to do for a tensor, with the bits of ``digest.py``.

It reads each byte once, where it lies: dense tensors of any length and alignment, rows that lie apart where a row is dense and a
multiple of 1024 bytes or the rows are of 16 bytes each and taken together. Anything else is copied first. A launch does one level
or two; what is above them in a large tensor is 1/256 of it, and is done for many tensors at once, later (``vectors.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.runtime.nvrtc import CudaKernel
from samebits.verify.trace import digest
from samebits.verify.trace.digest import CHUNK, COLUMNS, FAN_IN, LAST

LEVELS = 6
"""Of keys: enough for 256 GiB."""
PIECE = 16
"""Bytes that a lane of the kernel takes at once."""
WORD = 4
VECTOR = COLUMNS * WORD
"""Bytes of a vector."""


@dataclass(frozen=True)
class TraceKernel(CudaKernel):
    """A kernel of this folder. It belongs to no operator, so it has no headers but the general ones."""

    @property
    def source(self) -> str:
        return f"verify/trace/{self.entry}.cu"


KERNEL = TraceKernel(op="", entry="digest_tree")


# --- what to do ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """What the kernel does for one tensor, or for all of its rows: ``trees`` trees of equal size."""

    level: int
    """The first one that it does."""
    trees: int
    each: int
    """Vectors that it leaves of each tree; more than 256 where levels are missing."""
    tiles: int
    """Of all trees."""
    numbers: tuple[int, ...]
    """The kernel's ``per_run`` to ``joined``."""
    deep: bool
    """It does the level above the first as well."""
    next_level: int


@functools.lru_cache(maxsize=4096)
def part(
    width: int,
    runs: int = 1,
    stride: int = 0,
    trees: int = 1,
    tree_stride: int = 0,
    level: int = 1,
    shallow: bool = False,
) -> Part:
    """``runs`` of ``width`` bytes make a tree. ``shallow``: no level above the first, whatever there is.

    RuntimeError: there are too many bytes.
    """
    joined = runs > 1 and width % CHUNK != 0 and not shallow
    per_run = math.ceil((width * runs if joined else width) / CHUNK)
    chunks = per_run * (1 if joined else runs)
    if chunks == 0 or trees == 0:
        return Part(level, trees, 0, 0, (0,) * 7, False, level + 1)
    deep = chunks > LAST and not shallow
    tiles = math.ceil(chunks / FAN_IN)
    numbers = (per_run, chunks, tiles, width, stride if runs > 1 else 0, tree_stride, width * runs if joined else 0)
    found = Part(level, trees, tiles if deep else chunks, tiles * trees, numbers, deep, level + 1 + deep)
    left = found.each
    for _ in range(found.next_level, LEVELS + 1):
        left = math.ceil(left / FAN_IN)
    if level + deep > LEVELS or (left > LAST and not shallow) or found.tiles >= 2**32 - 1:
        raise RuntimeError("a tensor of more bytes than there are keys for")
    return found


@functools.lru_cache(maxsize=4096)
def of_bytes(shape: Sequence[int], strides: Sequence[int], size: int) -> Part | None:
    """All bytes of a tensor of elements of ``size`` bytes; None: it must be copied first."""
    found = _runs([(n, s * size) for n, s in zip(shape, strides, strict=True)], size)
    if found is None or (found[0] > 1 and found[1] % PIECE):
        return None
    runs, width, stride = found
    return part(width, runs, stride)


@functools.lru_cache(maxsize=4096)
def of_rows(shape: Sequence[int], strides: Sequence[int], size: int, lead: int) -> Part | None:
    """The same for each row, where the first ``lead`` axes count them."""
    axes = [(n, s * size) for n, s in zip(shape, strides, strict=True)]
    inner, outer = _runs(axes[lead:], size), _runs(axes[:lead], None)
    if inner is None or outer is None or inner[0] > 1:
        return None
    rows, width, apart = outer[0], inner[0] * inner[1], outer[2]
    if math.ceil(width / CHUNK) <= LAST:  # no level above: rows are like runs, and chunks of several share a tile
        return part(width, rows, apart, shallow=True)
    return part(width, 1, 0, rows, apart)


def above(count: int, level: int, trees: int = 1) -> Part:
    """The levels from ``level`` on, over ``count`` vectors of each tree that lie one behind the other."""
    return part(count * VECTOR, 1, 0, trees, count * VECTOR, level)


def _runs(axes: Sequence[tuple[int, int]], dense: int | None) -> tuple[int, int, int] | None:
    """Axes (size, stride in bytes), outermost first, as (runs, bytes of a run, bytes from run to run), or None.

    Without ``dense``, the size of an element, all axes count runs, of 0 bytes.
    """
    axes = [(n, s) for n, s in axes if n != 1]
    if any(n == 0 for n, _ in axes):
        return 0, 0, 0
    width = dense or 0
    while axes and dense and axes[-1][1] == width:
        width *= axes.pop()[0]
    runs, stride = 1, 0
    for n, s in reversed(axes):
        if runs > 1 and s != runs * stride:
            return None
        runs, stride = runs * n, stride if runs > 1 else s
    return runs, width, stride


def arranged_keys() -> Tensor:
    """int8 (level, step of 64 bytes, product, g, q, word, half of the 16 columns, byte); lane = 4 g + q, see ``digest_tree.cu``.

    A lane's 16 bytes of a step are two words for each product, of column g and of column g + 8.
    """
    found = torch.stack([digest._chunk_keys(level, torch.device("cpu")) for level in range(1, LEVELS + 1)])
    parts = found.view(LEVELS, 2, 8, CHUNK // 64, 4, 2, 2, 4)  # level, half, g, step, q, product, word, byte
    return parts.permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous()
