"""Two records of a tensor against each other: the same bits, or how they differ, or why nobody can say."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.exact.bits import bits
from samebits.exact.compare import first_difference, same_bits
from samebits.verify.drift.rows import Columns, Pairs, RowMap
from samebits.verify.trace.events import TensorRecord
from samebits.verify.trace.file import Trace

Verdict = Literal["same", "bits", "shape", "dtype", "value", "incomparable"]


@dataclass(frozen=True)
class Compared:
    """One place of a call in both runs."""

    where: str
    verdict: Verdict
    detail: str = ""
    rows: tuple[tuple[int, int], ...] = ()
    """The rows that differ, of A and of B, where rows were recorded."""

    @property
    def agrees(self) -> bool | None:
        """None: cannot be said."""
        return None if self.verdict == "incomparable" else self.verdict == "same"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"where": self.where, "verdict": self.verdict}
        if self.detail:
            found["detail"] = self.detail
        if self.rows:
            found["rows"] = [list(pair) for pair in self.rows[:20]]
        return found


@dataclass(frozen=True)
class Pair:
    """The two traces, and how their rows correspond."""

    a: Trace
    b: Trace
    rows: RowMap | None = None

    def columns(self, path: str, place: str) -> Columns | None:
        given = self.rows.columns if self.rows is not None else ()
        return next((c for c in given if c.place == place and fnmatch.fnmatchcase(path, c.modules)), None)


def compare(pair: Pair, path: str, place: str, a: TensorRecord, b: TensorRecord, by_row: bool = True) -> Compared:
    """``by_row=False``: the row map does not apply, as for parameters."""
    where = a.where if a.where == b.where else f"{a.where} / {b.where}"
    if a.dtype != b.dtype:
        return Compared(where, "dtype", f"{a.dtype} against {b.dtype}")
    columns = pair.columns(path, place) if by_row else None
    if columns is not None and a.shape != b.shape:
        return _compare_columns(pair, where, columns, a, b)
    mapped = pair.rows is not None and bool(pair.rows.a) and by_row
    if mapped and pair.rows is not None:
        pairs = pair.rows.pairs_for(a.row_shape, b.row_shape)
        if pairs is not None and a.one_row is not None and a.one_row == b.one_row:
            return _compare_rows(pair, where, a, b, pairs)
    if a.is_shard != b.is_shard:
        return Compared(where, "incomparable", "a shard against a whole tensor")
    if a.shape != b.shape:
        verdict: Verdict = "incomparable" if mapped else "shape"
        no_rule = " (no rows that the map relates)" if mapped else ""
        return Compared(where, verdict, f"{list(a.shape)} against {list(b.shape)}{no_rule}")
    if a.digest is None or b.digest is None:
        return Compared(where, "incomparable", a.note or b.note or "no digest")
    if a.digest == b.digest:
        return Compared(where, "same")
    if mapped:
        return Compared(where, "incomparable", "differs, but has no rows that the map relates")
    if a.row_shape == b.row_shape and a.row_count and b.row_count:
        found = _compare_rows(pair, where, a, b, tuple((i, i) for i in range(a.row_count)))
        if found.verdict == "bits":
            return found
    both = _kept(pair, a, b)
    return Compared(where, "bits", "" if both is None else magnitude(*both))


def _compare_rows(pair: Pair, where: str, a: TensorRecord, b: TensorRecord, pairs: Pairs) -> Compared:
    different = tuple((i, j) for i, j in pairs if a.row(i) != b.row(j))
    if not different:
        return Compared(where, "same")
    i, j = different[0]
    named = f"row {i}" if i == j else f"row {i} of A, row {j} of B"
    detail = f"{named} first, {len(different)} of {len(pairs)} rows differ"
    both = _kept(pair, a, b)
    if both is not None:
        detail += f"; in it {magnitude(_one(both[0], a, i), _one(both[1], b, j))}"
    return Compared(where, "bits", detail, different)


def _one(tensor: Tensor, record: TensorRecord, index: int) -> Tensor:
    """One row of a kept tensor, flat."""
    assert record.row_shape is not None and record.row_axis is not None
    count = len(record.row_shape)
    front = tensor.movedim(tuple(range(record.row_axis, record.row_axis + count)), tuple(range(count)))
    return front.flatten(0, count - 1)[index].reshape(-1)


def _compare_columns(pair: Pair, where: str, columns: Columns, a: TensorRecord, b: TensorRecord) -> Compared:
    both = _kept(pair, a, b)
    if both is None:
        return Compared(where, "incomparable", "a part against a whole: keep the full tensors of both (tensors=...)")
    left, right = both
    if not -left.dim() <= columns.axis < left.dim() or left.shape[columns.axis] % columns.of:
        return Compared(
            where, "incomparable", f"axis {columns.axis} of {list(a.shape)} has no {columns.of} equal parts"
        )
    part = left.chunk(columns.of, columns.axis)[columns.part]
    if part.shape != right.shape:
        return Compared(where, "shape", f"part {list(part.shape)} of A against {list(right.shape)}")
    if same_bits(part, right):
        return Compared(where, "same")
    return Compared(where, "bits", magnitude(part, right))


def magnitude(left: Tensor, right: Tensor) -> str:
    """Where two tensors of one kind first differ, and how far."""
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if left.element_size() == 1 and left.is_floating_point():  # FP8: torch has no arithmetic for it
        unequal = (bits(left) != bits(right)).flatten()
        return f"element {int(unequal.to(torch.uint8).argmax())} first, {int(unequal.sum())} of {left.numel()} elements differ"
    found = first_difference(left, right)
    if found is None:
        return "the kept tensors agree"
    index = (found.row, *found.column) if left.dim() > 1 else (found.row,)
    ulp = "NaN against number" if found.max_ulp is None else f"at most {found.max_ulp} ulp apart"
    apart = f", {ulp}" if left.is_floating_point() else ""
    return (
        f"element {', '.join(map(str, index))}: {found.left_bits} ({found.left:.9g}) against {found.right_bits} "
        f"({found.right:.9g}); {found.count} of {found.total} elements differ{apart}"
    )


def _kept(pair: Pair, a: TensorRecord, b: TensorRecord) -> tuple[Tensor, Tensor] | None:
    if a.kept is None or b.kept is None:
        return None
    return pair.a.tensor(a.kept), pair.b.tensor(b.kept)
