"""How much is compared: numbers of rows, and the batches made of them. Pure, no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PROBES = 8
"""Rows that are followed through batches of every size."""


@dataclass(frozen=True)
class Scale:
    """Everything is a number of rows unless it says otherwise."""

    alone: tuple[int, ...]
    """Batches whose every row is also run alone. Bits are compared between ours and a peer at these sizes, and at 1."""
    full: int
    """The batch that is compared with its sub-batches. Its rows are the drawn ones, again and again."""
    sweep: int
    """Batches of sizes up to this one are made around the probe rows."""
    judged: int
    """The batch whose error is measured."""
    timed: tuple[int, ...]
    seeds: tuple[int, ...] = (3, 4, 5)
    """Inputs of the first two checks of batch invariance; everything else takes the first."""
    repeats: int = 4
    """Runs of the largest ``alone`` batch, the first included."""
    widest: int | None = None
    """The default size of a free axis is at most this one; None: the first tuned size."""
    compile: bool = True
    """Run the peers that are compiled with torch.compile."""
    seconds: float = 1.0
    """Time spent on one measurement, beyond its least number of rounds."""

    def __post_init__(self) -> None:
        named = {"alone": self.alone, "timed": self.timed, "full": (self.full,), "sweep": (self.sweep,)}
        named |= {"judged": (self.judged,)}
        for name, counts in named.items():
            if not counts or min(counts) < 1:
                raise ValueError(f"{name} = {counts}: expected numbers of rows of at least 1")
        if not self.seeds or self.repeats < 2:
            raise ValueError("at least one seed and two runs are needed")

    @property
    def drawn(self) -> int:
        """Distinct rows; a larger batch holds each of them several times."""
        return max(*self.alone, self.judged, PROBES + 1)


_GPU = Scale(alone=(64, 257, 2048), full=32768, sweep=2049, judged=257, timed=(1, 64, 256, 2048, 32768))
_GPU_QUICK = Scale(alone=(64, 257), full=4096, sweep=257, judged=257, timed=(1, 2048), seeds=(3,), seconds=0.2)
_CPU = Scale(alone=(64, 257), full=512, sweep=65, judged=64, timed=(1, 64), seeds=(3, 4), widest=64, seconds=0.2)
_CPU_QUICK = Scale(
    alone=(9, 33),
    full=64,
    sweep=17,
    judged=33,
    timed=(1, 33),
    seeds=(3,),
    repeats=2,
    widest=64,
    compile=False,
    seconds=0.02,
)


def default(device: str, quick: bool) -> Scale:
    """A full comparison on a GPU takes minutes, a quick one on a CPU seconds."""
    if device == "cuda":
        return _GPU_QUICK if quick else _GPU
    return _CPU_QUICK if quick else _CPU


def pieces(full: int) -> Iterator[range]:
    """Consecutive sub-batches of unlike sizes, again and again until they cover all rows."""
    sizes = [size for size in dict.fromkeys((1, 7, full // 32 + 1, full // 4, full // 2)) if 0 < size < full] or [full]
    start = 0
    while start < full:
        for size in sizes:
            if start >= full:
                return
            yield range(start, min(start + size, full))
            start += size


def sweep_sizes(most: int) -> list[int]:
    """1 .. 9 and every 2^k - 1, 2^k, 2^k + 1, up to ``most``."""
    around = {size + offset for size in (2**k for k in range(3, most.bit_length() + 1)) for offset in (-1, 0, 1)}
    return sorted(size for size in {*range(1, 10), *around} if size <= most)


@dataclass(frozen=True)
class Placement:
    """A batch of row ids, and where in it the probe rows are."""

    label: str
    ids: tuple[int, ...]
    probes: tuple[tuple[int, int], ...]
    """(position, id of the probe row)."""


def placements(size: int, drawn: int) -> Iterator[Placement]:
    """Probe rows in front, in the middle and at the back of a batch of ``size``, and the first batch reversed.

    The rest of the batch are other rows than the probes.
    """
    count = min(PROBES, size)
    others = [PROBES + k % (drawn - PROBES) for k in range(size - count)]
    front = [*range(count), *others]
    for name, before in (("front", 0), ("middle", (size - count) // 2), ("back", size - count)):
        ids = (*others[:before], *range(count), *others[before:])
        yield Placement(f"{name} of {size}", ids, tuple((before + k, k) for k in range(count)))
    yield Placement(f"reversed {size}", tuple(front[::-1]), tuple((size - 1 - k, k) for k in range(count)))
