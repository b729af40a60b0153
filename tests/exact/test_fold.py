"""The orders (H16), against the plainest spelling of each in Python numbers rounded to FP32 by numpy."""

import numpy as np
import pytest
import torch

from samebits.exact import fold
from samebits.exact.compare import same_bits


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3


def lanes_then_halves(values, lanes, width, groups=1):
    acc = [np.float32(0)] * lanes
    for index, value in enumerate(values):
        lane = index // width % lanes
        acc[lane] = acc[lane] + value
    size = lanes // groups
    parts = [halve(acc[g * size : (g + 1) * size]) for g in range(groups)]
    return halve(parts)


def halve(values):
    while len(values) > 1:
        half = len(values) // 2
        values = [values[u] + values[u + half] for u in range(half)]
    return values[0]


@pytest.mark.parametrize("size", [1, 5, 256, 700, 4099, 8200])
def test_folds_over_the_last_axis(size):
    terms = draw(2, size)
    for row, values in enumerate(terms.numpy()):
        total = np.float32(0)
        for value in values:
            total = total + value
        assert fold.left_fold(terms, -1)[row].item() == total
        assert fold.tree512(terms)[row].item() == lanes_then_halves(values, 512, 8)
        assert fold.tree256(terms)[row].item() == lanes_then_halves(values, 256, 1, groups=8)


def test_signs_of_zero():
    negative = torch.full((4, 3), -0.0)
    assert same_bits(fold.left_fold(negative, 0), torch.zeros(3))
    assert same_bits(fold.tree4(negative, 0), torch.full((3,), -0.0))
    assert same_bits(fold.tree256(negative.t()), torch.zeros(3))


def test_tree4_order():
    a, b, c, d = (np.float32(v) for v in (1e8, 1.0, -1e8, 1.0))
    assert fold.tree4(torch.tensor([a, b, c, d]), 0).item() == (a + b) + (c + d)
