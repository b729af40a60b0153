"""Which row of one run is which row of another: how runs of different batch composition are compared.

As JSON: ``{"format": "samebits-rows", "version": 1, "a": [8], "b": [1], "pairs": [[3, 0]]}`` says that A has a batch of 8 and B a
batch of 1, and that row 3 of A is row 0 of B. With two axes, ``"a": [2, 5]``, the rows are the positions of 2 sequences of 5,
counted in index order. ``"columns"`` is for tensor parallelism, see :class:`Columns`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FORMAT = "samebits-rows"
VERSION = 1
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Columns:
    """B holds part ``part`` of ``of`` of an axis that A has whole, in the calls of the modules that match ``modules``.

    Comparable where full tensors were kept of A and B; a digest of the whole says nothing about a part.
    """

    modules: str
    axis: int
    part: int
    of: int
    place: Literal["inputs", "outputs"] = "outputs"


@dataclass(frozen=True)
class RowMap:
    """``a`` and ``b``: the axes that count the rows, in a model input of each run. ``pairs``: rows of A with rows of B."""

    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()
    pairs: Pairs = ()
    columns: tuple[Columns, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.a) != bool(self.b):
            raise ValueError(f"a row map names the axes of both runs or of none, not {list(self.a)} and {list(self.b)}")
        for name, axes, index in (("a", self.a, 0), ("b", self.b, 1)):
            used = [pair[index] for pair in self.pairs]
            rows = math.prod(axes) if axes else 0
            outside = next((row for row in used if not 0 <= row < rows), None)
            if outside is not None:
                raise IndexError(f"row map: run {name} has {rows} rows, there is no row {outside}")
            if len(set(used)) != len(used):
                twice = next(row for row in used if used.count(row) > 1)
                raise ValueError(f"row map: row {twice} of run {name} is named twice")
        for part in self.columns:
            if not 0 <= part.part < part.of:
                raise IndexError(f"row map: there is no part {part.part} of {part.of}")

    def pairs_for(self, a: Sequence[int] | None, b: Sequence[int] | None) -> Pairs | None:
        """Pairs of rows for two tensors whose row axes have these sizes; None where the map says nothing about them.

        A tensor may have several rows per row of the map (tokens of a sequence, heads of a token): they correspond in order.
        """
        times, others = _rows_each(a, self.a), _rows_each(b, self.b)
        if times is None or times != others:
            return None
        return tuple((i * times + k, j * times + k) for i, j in self.pairs for k in range(times))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()) + "\n")


def _rows_each(shape: Sequence[int] | None, axes: tuple[int, ...]) -> int | None:
    """How many rows of a tensor belong to one row of the map, or None if its leading axes are not those of the map.

    They are if they are the same axes, or the same number flattened into one; a batch may be flattened with what follows it.
    """
    if not shape or not axes:
        return None
    if tuple(shape[: len(axes)]) == axes:
        return math.prod(shape[len(axes) :])
    rows = math.prod(axes)
    if shape[0] == rows:
        return math.prod(shape[1:])
    if len(axes) == 1 and rows and shape[0] % rows == 0:
        return math.prod(shape) // rows
    return None


def read_rows(path: str | Path) -> RowMap:
    """A row map from its JSON file. Raises ValueError or IndexError where it is none, or names rows that are not there."""
    try:
        data = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ValueError(f"{path} is no row map: expected format {FORMAT!r}, version {VERSION}")
    unknown = set(data) - {"format", "version", "a", "b", "pairs", "columns"}
    if unknown:
        raise ValueError(f"{path}: unknown field {sorted(unknown)[0]!r}")
    try:
        columns = tuple(Columns(**entry) for entry in data.get("columns", []))
        pairs = tuple((int(i), int(j)) for i, j in data.get("pairs", []))
        return RowMap(tuple(map(int, data.get("a", []))), tuple(map(int, data.get("b", []))), pairs, columns)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


# --- makers -----------------------------------------------------------------------------------------------------------


def batch_rows(a: int, b: int, pairs: Iterable[tuple[int, int]]) -> RowMap:
    """A batch of ``a`` against a batch of ``b``. ``batch_rows(8, 1, [(3, 0)])``: row 3 of A ran alone in B."""
    return RowMap((a,), (b,), tuple(pairs))


def permuted_rows(order: Sequence[int]) -> RowMap:
    """B has the rows of A in another order: its row j is row ``order[j]`` of A. Raises ValueError if that is no permutation."""
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"not a permutation of 0 .. {len(order) - 1}: {list(order)}")
    return batch_rows(len(order), len(order), ((i, j) for j, i in enumerate(order)))


def padded_rows(lengths: Sequence[int], a: int, b: int, side: Literal["left", "right"] = "right") -> RowMap:
    """The same sequences, padded to ``a`` positions in A and to ``b`` in B, on the same side. Record with ``rows=2``."""
    _check_lengths(lengths, min(a, b))
    pairs = []
    for index, length in enumerate(lengths):
        starts = [(padded - length if side == "left" else 0) + index * padded for padded in (a, b)]
        pairs += [(starts[0] + k, starts[1] + k) for k in range(length)]
    return RowMap((len(lengths), a), (len(lengths), b), tuple(pairs))


def packed_rows(lengths: Sequence[int], padded: int) -> RowMap:
    """A: sequences padded on the right to ``padded`` positions. B: the same, packed one behind the other in a batch of 1.

    Record with ``rows=2``.
    """
    _check_lengths(lengths, padded)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    pairs = [(i * padded + k, starts[i] + k) for i, length in enumerate(lengths) for k in range(length)]
    return RowMap((len(lengths), padded), (1, sum(lengths)), tuple(pairs))


def column_shards(modules: Iterable[str], part: int, of: int, axis: int = -1) -> RowMap:
    """A computes whole tensors, B the part ``part`` of ``of`` of an axis of these modules' outputs, as under tensor parallelism."""
    return RowMap(columns=tuple(Columns(pattern, axis, part, of) for pattern in modules))


def _check_lengths(lengths: Sequence[int], padded: int) -> None:
    wrong = next((length for length in lengths if not 0 <= length <= padded), None)
    if wrong is not None:
        raise ValueError(f"a sequence of {wrong} does not fit in {padded} positions")
