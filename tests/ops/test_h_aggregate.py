"""``h_aggregate``: everything an operator must do, and its edges."""

import torch

from samebits import h_aggregate
from samebits.verify.conformance import Conformance


class TestHAggregate(Conformance):
    op = "h_aggregate"


def test_four_minus_zeros_stay_minus_zero() -> None:
    """E9"""
    hidden = h_aggregate(torch.ones(2, 4), torch.full((2, 4, 3), -0.0).bfloat16())
    assert hidden.signbit().all()


def test_streams_are_paired_as_a_tree() -> None:
    """(1e8 + 1) + (-1e8 + 1) = 0 in FP32; from left to right it would be 1."""
    pre = torch.ones(1, 4)
    streams = torch.tensor([2.0**27, 1.0, -(2.0**27), 1.0]).bfloat16().view(1, 4, 1)
    assert h_aggregate(pre, streams).item() == 0.0
