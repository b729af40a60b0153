"""Hopper's kernel of the three products, ``gemm_wgmma.cu``: its tiles, what a product takes with each, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samebits.runtime.launch import ELEMENTS, Launch, launch_with_maps
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.tensor_map import tensor_map

ENTRY = "gemm_wgmma"
_STAGE = 64
"""Reduction indices of a stage, and rows of a box of a turned operand."""
_THREADS = 384
_PER_CLOCK = 2048
"""Products of a multiprocessor."""
_TILE_CLOCKS = 2500
"""Around the products of a tile: its first stage, its results."""


@dataclass(frozen=True)
class Tile:
    """How a block cuts its work; the names in capitals are those of the macros."""

    MI: int
    NB: int
    STAGES: int
    SHARE: int
    CROSS: int
    """1: the columns of the result are the A side, so that the batch, which may be small, is cut into NB rows."""

    @property
    def rows(self) -> int:
        """Of A."""
        return 128 * self.MI

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

    def shared(self, turned_b: bool) -> int:
        """Bytes of a block: the stages, from a multiple of 1024 on, and two barriers of each."""
        rows_b = -(-self.NB // _STAGE) * _STAGE if turned_b else self.NB
        return self.STAGES * ((self.rows + rows_b) * 2 * _STAGE + 16) + 1024


@dataclass(frozen=True)
class Sides:
    """A product as the kernel has it: out (rows, columns) = A (rows, size) B (columns, size)^T, or out turned where CROSS."""

    rows: int
    columns: int
    size: int
    turned_a: bool
    turned_b: bool


RATE = {
    Tile(1, 256, 4, 0, 0): 0.955,
    Tile(2, 144, 4, 1, 1): 0.94,
    Tile(2, 160, 4, 1, 1): 0.95,
    Tile(2, 176, 4, 1, 1): 0.95,
    Tile(2, 136, 4, 1, 1): 0.92,
    Tile(2, 88, 4, 2, 1): 0.8,
    Tile(1, 136, 6, 1, 1): 0.72,
    Tile(1, 88, 7, 2, 1): 0.65,
    Tile(1, 256, 4, 2, 0): 0.93,
}
"""The tiles, and the part of the unit's rate that the inner loop is expected to reach with each."""


BATCH = tuple(tile for tile in RATE if tile.SHARE < 2 or tile.CROSS)
"""For products with the rows of the batch."""
WEIGHT = (Tile(1, 256, 4, 2, 0),)
"""For the gradient of a weight, both of whose axes are long."""


def clocks(tile: Tile, sides: Sides, multiprocessors: int) -> float:
    """What the multiprocessor with the most tiles takes."""
    tiles = tile.tiles(sides.rows, sides.columns)
    own = -(-tiles // tile.units(sides.rows, sides.columns, multiprocessors))
    stages = -(-sides.size // _STAGE)
    return own * (stages * _STAGE * tile.rows * tile.NB / _PER_CLOCK / RATE[tile] + _TILE_CLOCKS)


def planned(tile: Tile, sides: Sides, dtype: str, multiprocessors: int, band: int) -> Launch:
    defines = vars(tile) | {"ELEMENT": ELEMENTS[dtype], "TA": int(sides.turned_a), "TB": int(sides.turned_b)}
    blocks = tile.units(sides.rows, sides.columns, multiprocessors) * tile.blocks
    kernel = CudaKernel("linear", ENTRY, tuple(sorted(defines.items())))
    return Launch(kernel, blocks, _THREADS, tile.shared(sides.turned_b), arguments=(tile.CROSS, band))


def multiply(
    step: Launch, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | int, start: Tensor | int, sizes: tuple[int, int, int]
) -> None:  # fmt: skip
    """``a`` and ``b`` as they are stored; ``sizes`` = (rows, columns, reduction indices) of the sides."""
    macros = dict(step.kernel.defines)
    map_a = tensor_map(a, (_STAGE, _STAGE) if macros["TA"] else (128 * macros["MI"], _STAGE))
    map_b = tensor_map(b, (_STAGE, _STAGE) if macros["TB"] else (macros["NB"], _STAGE))
    start_line = start.stride(0) if isinstance(start, Tensor) else 0
    launch_with_maps(
        step, map_a, map_b, out, bias, start, start_line, *sizes, int(out.element_size() == 4), step.arguments[1]
    )
