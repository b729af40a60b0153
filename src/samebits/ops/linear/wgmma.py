"""Hopper's kernel of the three products, ``gemm_wgmma.cu``: its tiles, what a product takes with each, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.tensor_map import tensor_map

ENTRY = "gemm_wgmma"
_STAGE = 64
"""Reduction indices of a stage, and rows of a box of a turned operand."""
_THREADS = 384
_PER_CLOCK = 2048
"""Products of a multiprocessor."""
_TILE_CLOCKS = 4500
"""Around the products of a tile, where nothing hides them: its first stage, its results."""
SHARED = 227 * 1024
"""Bytes of a block, all that it can have: results take what the stages leave."""


@dataclass(frozen=True)
class Tile:
    """How a block cuts its work; the names in capitals are those of the macros."""

    MI: int
    NB: int
    STAGES: int
    TURNS: int
    """1: the warpgroups have a tile each and take turns, so that one stores while the other multiplies."""
    SHARE: int
    """2: the blocks of a pair have the rows of B in common, 1: of A; 0: no pairs."""
    CROSS: int
    """1: the columns of the result are the A side, so that the batch, which may be small, is cut into NB rows."""

    @property
    def rows(self) -> int:
        """Of A."""
        return (64 if self.TURNS else 128) * self.MI

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return 2 if self.SHARE else 1

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of clusters; ``rows`` of A and ``columns``, rows of B."""
        high, wide = self.rows * (2 if self.SHARE == 2 else 1), self.NB * (2 if self.SHARE == 1 else 1)
        return -(-rows // high) * -(-columns // wide)

    def units(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Clusters at work."""
        return min(self.tiles(rows, columns), max(multiprocessors // self.blocks, 1))


@dataclass(frozen=True)
class Sides:
    """A product as the kernel has it: out (rows, columns) = A (rows, size) B (columns, size)^T, or out turned where CROSS."""

    rows: int
    columns: int
    size: int
    turned_a: bool
    turned_b: bool


class Seen(NamedTuple):
    """What an H200 showed of a tile."""

    rate: float
    """The part of the unit's rate that stands for its inner loop, so that :func:`clocks` puts tiles in the order of their times."""
    band: int
    """Tiles of the A side that are worked on together. Blocks that read the same at one time should share a part of the chip, where
    their requests become one; which number does that was found by trying."""


_BATCH = {
    Tile(2, 88, 7, 1, 0, 1): Seen(0.81, 4),
    Tile(4, 88, 4, 1, 0, 1): Seen(0.76, 4),
    Tile(2, 136, 4, 0, 1, 1): Seen(0.95, 8),
    Tile(2, 136, 6, 1, 1, 1): Seen(0.91, 8),
    Tile(2, 160, 4, 0, 1, 1): Seen(0.99, 8),
    Tile(2, 160, 5, 1, 1, 1): Seen(0.957, 8),
    Tile(1, 232, 4, 0, 2, 1): Seen(0.94, 8),
    Tile(1, 256, 4, 0, 0, 0): Seen(1.02, 8),
}
_WEIGHT = {Tile(2, 128, 5, 1, 0, 0): Seen(0.95, 8), Tile(1, 256, 4, 0, 2, 0): Seen(0.93, 8)}
BATCH, WEIGHT = tuple(_BATCH), tuple(_WEIGHT)
"""For products with the rows of the batch; for the gradient of a weight, both of whose axes are long."""
_SEEN = _BATCH | _WEIGHT


def clocks(tile: Tile, sides: Sides, multiprocessors: int) -> float:
    """What the multiprocessor with the most tiles takes."""
    tiles = tile.tiles(sides.rows, sides.columns)
    own = -(-tiles // tile.units(sides.rows, sides.columns, multiprocessors))
    stages = -(-sides.size // _STAGE)
    products = stages * _STAGE * tile.rows * tile.NB / _PER_CLOCK / _SEEN[tile].rate
    return own * products + (1 if tile.TURNS else own) * _TILE_CLOCKS


def planned(tile: Tile, sides: Sides, dtype: str, wide: bool, multiprocessors: int) -> Launch:
    defines = vars(tile) | {
        "ELEMENT": ELEMENTS[dtype], "WIDE": int(wide), "TA": int(sides.turned_a), "TB": int(sides.turned_b), "SHARED": SHARED,
    }  # fmt: skip
    blocks = tile.units(sides.rows, sides.columns, multiprocessors) * tile.blocks
    kernel = CudaKernel("linear", ENTRY, tuple(sorted(defines.items())))
    return Launch(kernel, blocks, _THREADS, SHARED, arguments=(tile.CROSS, _SEEN[tile].band))


def multiply(
    step: Launch, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | int, start: Tensor | int, sizes: tuple[int, int, int]
) -> None:  # fmt: skip
    """``a`` and ``b`` as they are stored; ``sizes`` = (rows, columns, reduction indices) of the sides."""
    macros = dict(step.kernel.defines)
    rows = (64 if macros["TURNS"] else 128) * macros["MI"]
    map_a = tensor_map(a, (_STAGE, _STAGE) if macros["TA"] else (rows, _STAGE))
    map_b = tensor_map(b, (_STAGE, _STAGE) if macros["TB"] else (macros["NB"], _STAGE))
    map_out = tensor_map(out, (8 if macros["CROSS"] else 64, 128 // out.element_size()))
    start_line = start.stride(0) if isinstance(start, Tensor) else 0
    launch(step, map_a, map_b, map_out, bias, start, start_line, *sizes, step.arguments[1])
