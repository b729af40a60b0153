"""Which rank holds which tokens, in the order of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.dispatch import UnsupportedError


@dataclass(frozen=True)
class Chunk:
    """Tokens ``first`` .. ``last`` - 1 of the whole batch, held together by one rank."""

    rank: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class TokenOrder:
    """Every chunk of a batch, ascending. A fold over the tokens goes through them in this order."""

    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        expected = 0
        for chunk in self.chunks:
            if chunk.first != expected or chunk.last < chunk.first:
                raise UnsupportedError(
                    f"token shards must partition the batch: the chunk [{chunk.first}, {chunk.last}) of rank {chunk.rank} "
                    f"does not begin where the one before it ends ({expected})"
                )
            expected = chunk.last

    @property
    def rows(self) -> int:
        return self.chunks[-1].last if self.chunks else 0

    def of(self, rank: int) -> list[Chunk]:
        """The chunks of one rank, ascending."""
        return [chunk for chunk in self.chunks if chunk.rank == rank]

    def require_cuts(self, multiple: int, contract: str) -> None:
        """Refuse cuts after which a fold under ``contract`` cannot be continued (``Contract.chain_rows``)."""
        if not multiple and len(self.chunks) > 1:
            raise UnsupportedError(f"contract {contract!r} sums over rows in an order that cannot be cut")
        for chunk in self.chunks:
            if multiple and chunk.last % multiple and chunk.last != self.rows:
                raise UnsupportedError(
                    f"contract {contract!r} folds over steps of {multiple} rows, but rank {chunk.rank} ends at token "
                    f"{chunk.last}: cut at multiples of {multiple}, or use an ascending contract"
                )

    @classmethod
    def contiguous(cls, rows: Sequence[int]) -> TokenOrder:
        """Rank r holds ``rows[r]`` tokens, the ranks in order: sequence, data or context parallelism by blocks."""
        return cls(_laid_out([(rank, count) for rank, count in enumerate(rows)]))

    @classmethod
    def zigzag(cls, ranks: int, rows: int) -> TokenOrder:
        """2 * ranks chunks of ``rows`` tokens; rank r holds chunks r and 2 * ranks - 1 - r: balanced causal attention."""
        return cls(_laid_out([(rank, rows) for rank in (*range(ranks), *reversed(range(ranks)))]))

    @classmethod
    def from_positions(cls, positions: Sequence[Sequence[int]]) -> TokenOrder:
        """From the token positions that each rank holds, in the order in which it holds them.

        Raises:
            UnsupportedError: a rank holds its tokens out of order, or the ranks do not partition the batch.
        """
        runs: list[Chunk] = []
        for rank, held in enumerate(positions):
            first = 0
            for at in range(1, len(held) + 1):
                if at == len(held) or held[at] != held[at - 1] + 1:
                    runs.append(Chunk(rank, held[first], held[at - 1] + 1))
                    first = at
            if list(held) != sorted(held):
                raise UnsupportedError(
                    f"rank {rank} holds its tokens out of order; a fold over tokens needs them ascending"
                )
        return cls(tuple(sorted(runs, key=lambda chunk: chunk.first)))


def _laid_out(counts: Sequence[tuple[int, int]]) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    first = 0
    for rank, count in counts:
        chunks.append(Chunk(rank, first, first + count))
        first += count
    return tuple(chunks)
