"""Hopper's kernel of the three products, ``gemm_wgmma.cu``: its tiles, what products take with each, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_TILE_CLOCKS = 1000
"""Around the products of a tile, where nothing hides them: its first stage, its results."""
GROUPS = 3
"""Products that one launch can compute."""
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

    def units(self, tiles: int, multiprocessors: int) -> int:
        """Clusters at work on so many tiles."""
        return min(tiles, max(multiprocessors // self.blocks, 1))


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
    Tile(2, 88, 7, 1, 0, 1): Seen(0.775, 2),
    Tile(4, 88, 4, 1, 0, 1): Seen(0.775, 4),
    Tile(2, 136, 4, 0, 1, 1): Seen(0.825, 8),
    Tile(2, 136, 6, 1, 1, 1): Seen(0.8, 8),
    Tile(2, 160, 4, 0, 1, 1): Seen(0.8, 8),
    Tile(2, 160, 5, 1, 1, 1): Seen(0.8, 8),
    Tile(1, 232, 4, 0, 2, 1): Seen(0.76, 8),
    Tile(1, 256, 4, 0, 0, 0): Seen(0.79, 8),
}
_WEIGHT = {Tile(2, 128, 5, 1, 0, 0): Seen(0.95, 8), Tile(1, 256, 4, 0, 2, 0): Seen(0.93, 8)}
BATCH, WEIGHT = tuple(_BATCH), tuple(_WEIGHT)
"""For products with the rows of the batch; for the gradient of a weight, both of whose axes are long."""
_SEEN = _BATCH | _WEIGHT


_SHORT, _LONG_QUEUE = 512, 14
"""Rows up to which, and tiles of a multiprocessor from which on, a 16-bit gradient of a weight takes pairs first: so it was on an
H200 for N = 21504 (27 tiles) at 264 rows, and not for 5376 (9 tiles). At 925 rows they gain a few per cent in a launch alone and
lose a seventh where launches follow one another."""
Way = tuple[Tile, Sequence[Sides]]
"""A tile, and the products of a launch as it takes them; they have one number of reduction indices."""


def ordered(ways: Sequence[Way], few: bool, wide: bool, multiprocessors: int) -> list[Way]:
    """Fewest clocks first."""

    def cost(way: Way) -> tuple[bool, float]:
        tile, sides = way
        first = not few and not wide and tile.SHARE > 0 and sides[0].size <= _SHORT
        return not (first and _own(tile, sides, multiprocessors) >= _LONG_QUEUE), clocks(tile, sides, multiprocessors)

    return sorted(ways, key=cost)


def clocks(tile: Tile, sides: Sequence[Sides], multiprocessors: int) -> float:
    """What the multiprocessor with the most tiles takes."""
    own = _own(tile, sides, multiprocessors)
    stages = -(-sides[0].size // _STAGE)
    products = stages * _STAGE * tile.rows * tile.NB / _PER_CLOCK / _SEEN[tile].rate
    return own * products + (1 if tile.TURNS else own) * _TILE_CLOCKS


def _own(tile: Tile, sides: Sequence[Sides], multiprocessors: int) -> int:
    """Tiles of the multiprocessor with the most."""
    tiles = _tiles(tile, sides)
    return -(-tiles // tile.units(tiles, multiprocessors))


def planned(tile: Tile, sides: Sequence[Sides], dtype: str, wide: bool, multiprocessors: int) -> Launch:
    """One product, or up to :data:`GROUPS` whose operands are turned alike."""
    defines = vars(tile) | {
        "ELEMENT": ELEMENTS[dtype], "WIDE": int(wide), "TA": int(sides[0].turned_a), "TB": int(sides[0].turned_b),
        "GROUPS": 1 if len(sides) == 1 else GROUPS, "SHARED": SHARED,
    }  # fmt: skip
    blocks = tile.units(_tiles(tile, sides), multiprocessors) * tile.blocks
    kernel = CudaKernel("linear", ENTRY, tuple(sorted(defines.items())))
    return Launch(kernel, blocks, _THREADS, SHARED, arguments=(tile.CROSS, _SEEN[tile].band))


def _tiles(tile: Tile, sides: Sequence[Sides]) -> int:
    return sum(tile.tiles(side.rows, side.columns) for side in sides)


class Product(NamedTuple):
    """out = A B^T + bias, its operands as they are stored; of a plan with CROSS, the sides have changed places."""

    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | int
    rows: int
    columns: int


def multiply(step: Launch, products: Sequence[Product], size: int, start: Tensor | int = 0) -> None:
    """``size``: reduction indices; ``start``: where the sums of a single product begin."""
    macros = dict(step.kernel.defines)
    rows = (64 if macros["TURNS"] else 128) * macros["MI"]
    box_a = (_STAGE, _STAGE) if macros["TA"] else (rows, _STAGE)
    box_b = (_STAGE, _STAGE) if macros["TB"] else (macros["NB"], _STAGE)
    box = (8 if macros["CROSS"] else 64, 128 // products[0].out.element_size())
    last_a = last_b = None  # products of the same rows have an operand in common
    arguments: list[Any] = []
    for out, a, b, bias, count, columns in products:
        if a is not last_a:
            map_a, last_a = tensor_map(a, box_a), a
        if b is not last_b:
            map_b, last_b = tensor_map(b, box_b), b
        arguments += map_a, map_b, tensor_map(out, box), bias, count, columns
    for _ in range(macros["GROUPS"] - len(products)):
        arguments += (*arguments[:3], 0, 0, 0)  # without rows it has no tiles
    start_line = start.stride(0) if isinstance(start, Tensor) else 0
    launch(step, *arguments, start, start_line, size, step.arguments[1])
