"""The products of FP32 layers in tiles that are staged through shared memory: which there are, in order, and their launches."""

from __future__ import annotations

from dataclasses import dataclass

from samebits.dispatch import Call
from samebits.runtime.launch import Launch
from samebits.runtime.nvrtc import CudaKernel

Steps = tuple[tuple[str, Launch], ...]
"""One way to a product: launches by what they do."""

CHUNK = 64
"""Terms that are summed before they are folded."""
_SHORT_SUM = 128
"""Elements of which every lane has one vector at most."""
_FEW_ROWS, _SOME_ROWS, _MORE_ROWS = 16, 128, 512
"""Up to here a tile of 8 or of 16 rows, or eight blocks for a narrow one, so that many blocks fetch at the same time."""
_FEW_COLUMNS = 8
"""Columns per multiprocessor up to which blocks share the lanes of a tile; with more columns other kernels have work enough."""


# --- x @ weight^T -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanes:
    """A tile of lane_tile.cu; the names in capitals are those of its macros."""

    R: int
    C: int
    GROUPS: int
    STAGES: int

    @property
    def tall(self) -> int:
        return 4 * self.R

    @property
    def wide(self) -> int:
        return 8 * self.C

    @property
    def warps(self) -> int:
        return 32 // self.GROUPS

    @property
    def shared(self) -> int:
        """Bytes: stages of two vectors of each line for every warp, then the sums of all warps."""
        stages = self.STAGES * 2 * 16 * self.warps * ((self.tall + self.wide) | 1)
        return max(stages, 4 * 32 * self.warps * self.R * self.C)


LOW, HIGH = Lanes(2, 2, 8, 16), Lanes(4, 2, 8, 12)
EIGHTHS, QUARTERS = Lanes(8, 6, 8, 4), Lanes(8, 6, 4, 4)


def linear(call: Call, name: str, summed: str, out: str, inputs: tuple[str, ...], silu: int) -> list[Steps]:
    """Best first; none where 16 bytes at a time are not legal."""
    columns, size = call.size(out), call.size(summed)
    if not _whole(call, inputs, size):
        return []
    if size <= _SHORT_SUM:
        return [] if columns % 4 else [_short(call, name, columns, size, silu)]
    if columns > _FEW_COLUMNS * call.device.multiprocessors:
        return []
    if call.rows <= _FEW_ROWS:
        order = (LOW, HIGH)
    elif call.rows <= _SOME_ROWS:
        order = (HIGH, LOW)
    else:
        order = (EIGHTHS, QUARTERS) if columns <= QUARTERS.wide and call.rows <= _MORE_ROWS else (QUARTERS, EIGHTHS)
    return [_long(call, name, cut, columns, silu) for cut in order if cut.shared <= call.device.shared_bytes]


def _short(call: Call, name: str, columns: int, size: int, silu: int) -> Steps:
    """A block goes through some tiles of rows: every one but its first is fetched while another is multiplied."""
    pairs, tall, wide = 4 * -(-size // 32), -(-call.rows // 64), -(-columns // 32)
    shared = 32 * pairs * (2 * 65 + 33)
    own = min(4, max(1, tall * wide // (16 * call.device.multiprocessors)))
    kernel = _kernel("linear_tile", PAIRS=pairs, SILU=silu)
    return ((name, Launch(kernel, (-(-tall // own), wide), 128, shared)),)


def _long(call: Call, name: str, cut: Lanes, columns: int, silu: int) -> Steps:
    """The lanes, then the last levels of their tree."""
    grid = (-(-call.rows // cut.tall) * cut.GROUPS, -(-columns // cut.wide))
    lanes = Launch(_kernel("lane_tile", **vars(cut)), grid, 32 * cut.warps, cut.shared)
    fold = Launch(_kernel("fold_lanes", PARTS=2 * cut.GROUPS, SILU=silu), -(-call.rows * columns // 128), 128)
    return ((name, lanes), (f"{name} fold", fold))


# --- grad @ weight ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Across:
    """A tile of across_tile.cu; the names are those of its macros."""

    R: int
    C: int
    ALONG: int
    SPLIT: int

    @property
    def tall(self) -> int:
        return 4 * self.R * (4 // self.ALONG)

    @property
    def wide(self) -> int:
        return 8 * self.C * self.ALONG


@dataclass(frozen=True)
class Chunks:
    """A tile of chunk_tile.cu; the names are those of its macros."""

    R: int
    C: int
    STAGES: int = 3

    @property
    def tall(self) -> int:
        return 4 * self.R

    @property
    def wide(self) -> int:
        return 8 * self.C

    @property
    def shared(self) -> int:
        """Bytes: of each warp stages of eight terms, and its sums."""
        return 8 * (self.STAGES * (2 * 16 * (self.tall | 1) + 4 * 8 * self.wide) + 4 * 32 * self.R * self.C)


DIRECT, SPLIT_LOW, SPLIT = Across(8, 8, 2, 0), Across(1, 12, 1, 1), Across(4, 12, 1, 1)
CHUNKS_LOW, CHUNKS, CHUNKS_NARROW = Chunks(2, 12), Chunks(6, 12), Chunks(6, 4)


def across(call: Call, name: str, summed: str, out: str, inputs: tuple[str, ...], slope: int) -> list[Steps]:
    """Best first; none where 16 bytes at a time are not legal."""
    rows, terms, columns = call.rows, call.size(summed), call.size(out)
    if not _whole(call, inputs, terms, columns):
        return []
    many = CHUNKS_NARROW if columns <= 32 else CHUNKS
    order: tuple[Across | Chunks, ...]
    if -(-rows // DIRECT.tall) * -(-columns // DIRECT.wide) >= call.device.multiprocessors:
        order = (DIRECT, many)
    elif terms <= 2 * CHUNK:
        order = (CHUNKS_LOW, DIRECT) if rows <= _FEW_ROWS else (DIRECT, CHUNKS_LOW)
    elif rows <= _FEW_ROWS:
        order = (SPLIT_LOW, CHUNKS_LOW)
    else:
        enough = 3 * -(-rows // many.tall) * -(-columns // many.wide) >= 2 * call.device.multiprocessors
        order = (many, SPLIT) if enough else (SPLIT, many)
    found = [
        _chunks(call, name, cut, columns, slope)
        if isinstance(cut, Chunks)
        else _across(call, name, cut, terms, columns, slope)
        for cut in order
    ]
    return [way for way in found if all(step.shared <= call.device.shared_bytes for _, step in way)]


def _across(call: Call, name: str, cut: Across, terms: int, columns: int, slope: int) -> Steps:
    chunks = -(-terms // CHUNK)
    grid = (-(-call.rows // cut.tall) * (chunks if cut.SPLIT else 1), -(-columns // cut.wide))
    step = (name, Launch(_kernel("across_tile", **vars(cut), SLOPE=0 if cut.SPLIT else slope), grid, 128))
    if not cut.SPLIT:
        return (step,)
    fold = Launch(_kernel("fold_chunks", SLOPE=slope), -(-call.rows * columns // 256), 256)
    return (step, (f"{name} fold", fold))


def _chunks(call: Call, name: str, cut: Chunks, columns: int, slope: int) -> Steps:
    grid = (-(-call.rows // cut.tall), -(-columns // cut.wide))
    return ((name, Launch(_kernel("chunk_tile", **vars(cut), SLOPE=slope), grid, 256, cut.shared)),)


# --- grad^T @ given ---------------------------------------------------------------------------------------------------


def weight_gradient(
    call: Call, name: str, weight: str, bias: str, out: str, inner: str, inputs: tuple[str, ...]
) -> list[Steps]:
    """Best first; none where 16 bytes at a time are not legal."""
    n, k = call.size(out), call.size(inner)
    if not _whole(call, inputs, n, k):
        return []
    wanted = {"WEIGHT": int(f"grad_{weight}" in call.wanted), "BIAS": int(f"grad_{bias}" in call.wanted)}
    if not wanted["WEIGHT"]:
        k = 1  # a block for the bias

    def tile(long: int) -> tuple[int, Launch]:
        """``long`` times 16 by 32 results; the long side lies where it leaves less over."""
        far = 16 * long
        tall, flat = ((-(-n // one), -(-k // other)) for one, other in ((far, 32), (32, far)))
        grid = min(tall, flat, key=lambda found: found[0] * found[1])
        kernel = _kernel("weight_tile", LONG=long, TALL=int(grid == tall), **wanted)
        return grid[0] * grid[1], Launch(kernel, grid, 128)

    (large, one), (_, other) = tile(8), tile(4)
    order = (one, other) if 4 * large >= 3 * call.device.multiprocessors else (other, one)
    return [((name, step),) for step in order]


def kernels(activated: bool) -> list[CudaKernel]:
    """All that some sizes choose, of which a sweep meets a few only. ``activated``: with SiLU and its slope too."""
    switch = (0, 1) if activated else (0,)
    shorts = [{"PAIRS": pairs, "SILU": silu} for pairs in (4, 8, 12, 16) for silu in switch]
    folds = [{"PARTS": 2 * cut.GROUPS, "SILU": silu} for cut in (EIGHTHS, QUARTERS) for silu in switch]
    across = [vars(cut) | {"SLOPE": slope} for cut in (DIRECT, SPLIT_LOW, SPLIT) for slope in switch[: 2 - cut.SPLIT]]
    chunks = [vars(cut) | {"SLOPE": slope} for cut in (CHUNKS_LOW, CHUNKS, CHUNKS_NARROW) for slope in switch]
    wanted = [{"WEIGHT": 1, "BIAS": 0}, {"WEIGHT": 1, "BIAS": 1}, {"WEIGHT": 0, "BIAS": 1}]
    weights = [
        {"LONG": long, "TALL": tall} | which
        for long in (8, 4) for tall in (1, 0) for which in wanted[: 2 + tall]
    ]  # fmt: skip
    found = {
        "linear_tile": shorts, "lane_tile": [vars(cut) for cut in (LOW, HIGH, EIGHTHS, QUARTERS)], "fold_lanes": folds,
        "across_tile": across, "chunk_tile": chunks, "fold_chunks": [{"SLOPE": slope} for slope in switch], "weight_tile": weights,
    }  # fmt: skip
    return [_kernel(entry, **choices) for entry, several in found.items() for choices in several]


def _kernel(entry: str, **choices: int) -> CudaKernel:
    return CudaKernel("timestep_mlp", entry, tuple(sorted(choices.items())))


def _whole(call: Call, inputs: tuple[str, ...], *widths: int) -> bool:
    """Tiles copy 16 bytes at a time. What we allocate is aligned."""
    return all(width % 4 == 0 for width in widths) and all(call.layout(name).aligned for name in inputs)
