"""The batches: every row is covered, every size is there, and probe rows are where the placement says."""

from __future__ import annotations

import pytest

from samebits.compare import scale
from samebits.compare.scale import PROBES, Scale, pieces, placements, sweep_sizes


@pytest.mark.parametrize("full", [1, 2, 7, 8, 24, 64, 512, 4096, 32768, 131072])
def test_sub_batches_cover_every_row_once(full):
    parts = list(pieces(full))
    assert [row for part in parts for row in part] == list(range(full))
    assert full == 1 or all(len(part) < full for part in parts)
    assert full < 8 or {1, 7} <= {len(part) for part in parts}


def test_sizes_around_every_power_of_two():
    sizes = sweep_sizes(2049)
    around = {2**k + offset for k in range(3, 12) for offset in (-1, 0, 1)}
    assert set(sizes) == {*range(1, 10), *around} and max(sizes) == 2049
    assert sizes == sorted(sizes)
    assert sweep_sizes(5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 5, 8, 9, 17, 64])
def test_probes_are_where_the_placement_says(size):
    found = list(placements(size, drawn=20))
    assert [placement.label for placement in found] == [
        f"front of {size}", f"middle of {size}", f"back of {size}", f"reversed {size}",
    ]  # fmt: skip
    for placement in found:
        assert len(placement.ids) == size
        assert [placement.ids[position] for position, _ in placement.probes] == [row for _, row in placement.probes]
        assert [row for _, row in placement.probes] == list(range(min(PROBES, size)))
        rest = set(range(size)) - {position for position, _ in placement.probes}
        assert all(PROBES <= placement.ids[position] < 20 for position in rest)
    front, middle, back, turned = found
    assert front.probes[0][0] == 0 and back.probes[-1][0] == size - 1
    assert middle.probes[0][0] == (size - min(PROBES, size)) // 2
    assert turned.ids == front.ids[::-1]


def test_quick_and_small_machines_do_less():
    gpu, gpu_quick, cpu, cpu_quick = (scale.default(kind, quick) for kind in ("cuda", "cpu") for quick in (False, True))
    assert gpu.alone == (64, 257, 2048) and gpu.seeds == (3, 4, 5) and gpu.sweep == 2049
    for more, less in ((gpu, gpu_quick), (gpu_quick, cpu_quick), (gpu, cpu), (cpu, cpu_quick)):
        assert max(more.alone) >= max(less.alone) and more.full > less.full and max(more.timed) > max(less.timed)
    assert gpu_quick.compile and cpu.compile and not cpu_quick.compile


@pytest.mark.parametrize(
    ("field", "value"), [("alone", ()), ("alone", (0,)), ("timed", (-1,)), ("full", 0), ("seeds", ()), ("repeats", 1)]
)
def test_a_scale_that_would_compare_nothing_is_refused(field, value):
    given = {"alone": (3,), "full": 8, "sweep": 8, "judged": 3, "timed": (1,)} | {field: value}
    with pytest.raises(ValueError, match=r"expected numbers of rows|at least one seed"):
        Scale(**given)
