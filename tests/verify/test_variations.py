import pytest

from samebits.verify.subject import GARBAGE_ROWS, ZERO_ROW
from samebits.verify.variations import AXES, variations


@pytest.mark.parametrize("rows", [1, 2, 18, 40, 300])
def test_every_variation_holds_canonical_rows_where_it_says(rows):
    for variation in variations(rows):
        kept = [part.ids[k] for part in variation.parts for k in part.keep]
        assert kept and len(set(kept)) == len(kept)
        assert all(0 <= row < rows for row in kept), variation.label
        others = [i for part in variation.parts for k, i in enumerate(part.ids) if k not in part.keep]
        assert all(i == ZERO_ROW or rows <= i < rows + GARBAGE_ROWS for i in others)
        if variation.axis in ("repeat", "padding", "chunk", "permutation", "single"):
            assert sorted(kept) == list(range(rows))


def test_labels_differ_and_axes_can_be_chosen():
    labels = [(v.axis, v.label) for v in variations(40)]
    assert len(set(labels)) == len(labels)
    assert {axis for axis, _ in labels} == set(AXES) - {"plan", "autograd", "fold"}
    assert {v.axis for v in variations(40, ("chunk", "batch"))} == {"batch", "chunk"}


def test_the_thresholds_are_crossed():
    sizes = {len(v.parts[0].ids) for v in variations(300, ("batch",))}
    assert {1, 7, 16, 17, 33, 127, 128, 129, 256, 257} <= sizes
    assert any(size > 40 for size in {len(v.parts[0].ids) for v in variations(40, ("batch",))})
