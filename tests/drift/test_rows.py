"""Row maps: runs of another batch composition are compared row by row, and a fault in one row is found there."""

from __future__ import annotations

import json

import pytest
import torch
from drift.models import Net, batch, nudge
from torch import nn

from samebits.verify.drift import (
    DriftError,
    RowMap,
    batch_rows,
    column_shards,
    drift,
    packed_rows,
    padded_rows,
    permuted_rows,
    read_rows,
)
from samebits.verify.trace import trace


class Exact(nn.Module):
    """Elementwise, so no row can depend on another; with a row-dependent fault on request."""

    def __init__(self, depends=False):
        super().__init__()
        self.scale, self.depends = nn.Parameter(torch.linspace(1, 2, 8)), depends

    def forward(self, x):
        y = x * self.scale
        return nudge(y, -1) if self.depends and y.shape[0] > 1 else y


class Model(nn.Module):
    def __init__(self, depends=False):
        super().__init__()
        self.first, self.second = Exact(), Exact(depends)

    def forward(self, x):
        return self.second(self.first(x))


def record(model, x, rows=1, **options):
    x = x.clone().requires_grad_()
    with trace(model, rows=rows, **options) as recording:
        model(x).sum().backward()
    return recording.trace


def test_one_row_against_a_batch():
    x = batch(8)
    for row in (0, 3, 7):
        result = drift(record(Model(), x), record(Model(), x[row : row + 1]), batch_rows(8, 1, [(row, 0)]))
        assert result.exit_code == 0 and result.counts("forward") == {"same": 3}
        wrong = drift(record(Model(), x), record(Model(), x[row : row + 1]), batch_rows(8, 1, [((row + 1) % 8, 0)]))
        assert wrong.exit_code == 1 and wrong.differing_inputs
    bad = drift(record(Model(True), x), record(Model(True), x[7:]), batch_rows(8, 1, [(7, 0)]))
    assert bad.first().event.path == "second" and bad.first().outputs[0].detail.startswith(
        "row 7 of A, row 0 of B first"
    )
    # a parameter's gradient sums over other rows: nothing can be said about it
    gradients = [j for j in bad.phases["backward"] if j.event.kind == "gradient"]
    assert {j.judgement for j in gradients} == {"incomparable"} and "sums over all rows" in gradients[0].notes[0]


def test_permutation_padding_and_tokens_of_a_batch():
    x = batch(6 * 5, 8).view(6, 5, 8)
    order = [3, 0, 5, 1, 4, 2]
    for rows in (1, 2):
        a, b = record(Model(), x, rows), record(Model(), x[order], rows)
        assert drift(a, b, permuted_rows(order)).exit_code == 0
        assert drift(a, b, permuted_rows(list(range(6)))).exit_code == 1
        faulty = drift(a, record(Model(True), x[order], rows), permuted_rows(order))
        assert faulty.first().event.path == "second" and faulty.first().outputs[0].rows[0][0] // (1, 5)[rows - 1] == 2
    flat = record(Model(), x.flatten(0, 1), 1)  # tokens flattened into one axis
    assert drift(flat, record(Model(), x[2:3].flatten(0, 1), 1), batch_rows(6, 1, [(2, 0)])).exit_code == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences(side):
    lengths, short, long = [2, 4], batch(2 * 4).view(2, 4, 8), torch.full((2, 7, 8), torch.nan)
    for i, n in enumerate(lengths):
        where, from_ = (slice(7 - n, 7), slice(4 - n, 4)) if side == "left" else (slice(n), slice(n))
        long[i, where] = short[i, from_]
    rows = padded_rows(lengths, 4, 7, side)
    result = drift(record(Model(), short, 2), record(Model(), long, 2), rows)
    assert result.exit_code == 0 and len(rows.pairs) == 6
    long[1, -1 if side == "left" else 0] += 1
    changed = drift(record(Model(), short, 2), record(Model(), long, 2), rows)
    assert changed.differing_inputs[0].inputs[0].rows == (((4 + 3, 7 + 6),) if side == "left" else ((4, 7),))


def test_packed_sequences():
    lengths, padded = [3, 1, 4], batch(3 * 4).view(3, 4, 8)
    packed = torch.cat([padded[i, :n] for i, n in enumerate(lengths)])
    rows = packed_rows(lengths, 4)
    a = record(Model(), padded, 2)
    assert drift(a, record(Model(), packed[None], 2), rows).exit_code == 0
    assert drift(a, record(Model(), packed, 1), rows).exit_code == 0
    packed[3] += 1
    assert drift(a, record(Model(), packed[None], 2), rows).differing_inputs[0].inputs[0].rows == ((4, 3),)


class Columns(nn.Module):
    """Scales every column by its own factor, all of them or one half: as a column-parallel layer splits its outputs."""

    def __init__(self, part=None):
        super().__init__()
        self.part = part
        self.q = Columns.Scale()

    class Scale(nn.Module):
        def forward(self, x, factors):
            return x[:, : factors.numel()] * factors

    def forward(self, x):
        factors = torch.linspace(1, 2, 6)
        return self.q(x[:, :1].expand(-1, 6), factors if self.part is None else factors.chunk(2)[self.part])


def test_columns_of_a_tensor_parallel_layer():
    def made(part, **options):
        return record(Columns(part), batch(), **options)

    whole, parts = made(None, tensors=True), [made(part, tensors=True) for part in range(2)]
    for part in range(2):
        found = drift(whole, parts[part], column_shards(["q"], part, 2)).phases["forward"]
        swapped = drift(whole, parts[part], column_shards(["q"], 1 - part, 2)).phases["forward"]
        assert [j.outputs[0].verdict for j in (found[0], swapped[0])] == ["same", "bits"]
        assert found[0].event.path == "q" and "element 0, 0" in swapped[0].outputs[0].detail
        assert found[1].outputs[0].verdict == "shape"  # the model's own output was not declared as a part
    without = drift(whole, made(0), column_shards(["q"], 0, 2)).phases["forward"]
    assert without[0].outputs[0].verdict == "incomparable" and "keep the full tensors" in without[0].outputs[0].detail
    thirds = drift(whole, parts[0], column_shards(["q"], 0, 4)).phases["forward"]
    assert thirds[0].outputs[0].verdict == "incomparable" and "no 4 equal parts" in thirds[0].outputs[0].detail


def test_axes_of_the_map_and_of_a_tensor():
    tokens = RowMap((2, 3), (1, 6), tuple((i, i) for i in range(6)))
    assert tokens.pairs_for((2, 3), (1, 6)) == tokens.pairs_for((6,), (6,)) == tokens.pairs
    assert tokens.pairs_for((2, 3, 2), (1, 6, 2))[:3] == ((0, 0), (1, 1), (2, 2))
    for a, b in (((2, 4), (1, 6)), ((2,), (1,)), (None, (1, 6)), ((12,), (12,)), ((), ())):
        assert tokens.pairs_for(a, b) is None
    alone = batch_rows(8, 1, [(3, 0)])
    assert alone.pairs_for((8,), (1,)) == ((3, 0),) and alone.pairs_for((16,), (2,)) == ((6, 0), (7, 1))
    assert alone.pairs_for((8, 2), (1, 2)) == ((6, 0), (7, 1))
    assert alone.pairs_for((1, 5), (1, 5)) is None  # no batch in it: positions, rotary tables


def test_tensors_without_rows_of_the_map():
    class WithTable(nn.Module):
        def __init__(self, change=0.0):
            super().__init__()
            self.inner, self.change = WithTable.Inner(), change

        class Inner(nn.Module):
            def forward(self, x, table):
                return x * table

        def forward(self, x):
            return self.inner(x, torch.linspace(1, 2, 8)[None] + self.change)

    x = batch(4)
    rows = batch_rows(4, 1, [(1, 0)])
    same = drift(record(WithTable(), x), record(WithTable(), x[1:2]), rows)
    assert same.exit_code == 0 and same.counts("forward") == {"same": 2}
    other = drift(record(WithTable(), x), record(WithTable(1.0), x[1:2]), rows)
    inner = next(j for j in other.phases["forward"] if j.event.path == "inner")
    assert inner.judgement == "unclear" and other.first() is inner and other.exit_code == 1


def test_json_form(tmp_path):
    for rows in (batch_rows(8, 1, [(3, 0)]), packed_rows([3, 1], 4), column_shards(["*.q", "*.k"], 1, 2)):
        rows.write(tmp_path / "rows.json")
        assert read_rows(tmp_path / "rows.json") == rows
    good = batch_rows(2, 2, [(0, 1)]).to_json()
    for change, error in (
        *(({"format": "x"}, ValueError), ({"version": 9}, ValueError), ({"pairs": [[0, 2]]}, IndexError)),
        *(({"pairs": [[0, 0], [0, 1]]}, ValueError), ({"a": []}, ValueError), ({"extra": 1}, ValueError)),
        *(({"columns": [{"modules": "q"}]}, ValueError), ({"pairs": 3}, ValueError)),
        ({"columns": [{"modules": "q", "axis": 0, "part": 2, "of": 2}]}, IndexError),
    ):
        (tmp_path / "rows.json").write_text(json.dumps(good | change))
        with pytest.raises(error):
            read_rows(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        read_rows(tmp_path / "rows.json")


def test_misuse():
    with pytest.raises(ValueError, match="permutation"):
        permuted_rows([0, 0])
    with pytest.raises(ValueError, match="does not fit"):
        padded_rows([5], 4, 7)
    with pytest.raises(ValueError, match="does not fit"):
        packed_rows([-1], 4)
    plain, rows = record(Net(), batch(), rows=0), batch_rows(4, 4, [(0, 0)])
    with pytest.raises(DriftError, match="record B with rows"):
        drift(record(Net(), batch()), plain, rows)
