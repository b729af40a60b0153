"""The logarithmic axis: every value has a place, and there is always something to read it by."""

from __future__ import annotations

import math

import pytest

from samebits.report.decades import BESIDE, Decades


def test_a_long_axis_goes_from_power_to_power():
    axis = Decades.over([0.02, 3e-4, 0.0, None, math.inf])
    assert (axis.low, axis.high) == (-4, -1)
    assert [axis.at(value) for value in (1e-4, 1e-3, 0.1)] == pytest.approx([0, 1, 3])
    assert list(axis.ticks().values()) == ["$10^{-4}$", "$10^{-3}$", "$10^{-2}$", "$10^{-1}$"]


def test_zero_and_what_is_not_finite_lie_beside_the_axis():
    axis = Decades.over([1e-3, 1.0], high=0)
    assert axis.at(0.0) == pytest.approx(-3 * BESIDE) and axis.at(math.inf) == pytest.approx(3 * (1 + BESIDE))
    assert axis.at(1e-300) == axis.at(0.0)


def test_many_powers_have_few_labels():
    ticks = Decades.over([1e-11, 0.5]).ticks()
    assert len(ticks) <= 5 and list(ticks.values())[-1] == "1"


@pytest.mark.parametrize("value", [10**power for power in (-7.0, -2.6, -2.5, -2.4, -0.01, 0.3)])
def test_a_single_value_has_a_label_near_it(value: float):
    axis = Decades.over([value])
    assert 0 <= axis.at(value) <= axis.span < 1
    assert axis.ticks()
    for tick, label in axis.ticks().items():
        assert 0 <= axis.at(tick) <= axis.span
        assert "$" in label or float(label) == tick


def test_a_short_axis_is_cut_to_its_values_or_whole():
    assert Decades.over([0.002, 0.009]).ticks().keys() == {0.002, 0.005, 0.01}
    whole = Decades.over([0.002, 0.009], whole=True)
    assert (whole.low, whole.high) == (-3, -2)


def test_nothing_measured_is_still_an_axis():
    for values in ([], [0.0], [None, math.inf]):
        assert Decades.over(values).ticks()
