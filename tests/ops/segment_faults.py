"""Sorted positions with one number wrong, and processes in which a kernel must refuse them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from samebits.segmentation import sorted_positions

FAULTS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "order_outside": ("order", (3,), 700),
    "order_negative": ("order", (3,), -1),
    "order_far_outside": ("order", (699,), 2**63 - 1),
    "order_of_another_row": ("order", (0,), 1),
    "first_not_zero": ("bounds", (0, 0), 1),
    "first_tile_not_zero": ("bounds", (0, 1), 1),
    "descending": ("bounds", (2, 0), 1),
    "beyond_the_end": ("bounds", (2, 0), 701),
    "overflowing": ("bounds", (1, 0), 2**63 - 1),
    "a_tile_too_many": ("bounds", (2, 1), 5),
    "a_tile_too_few": ("bounds", (1, 1), 0),
    "a_position_moved": ("bounds", (1, 0), 233),
    "a_position_twice": ("order", (1,), 0),
}


def broken(fault: str) -> tuple[Tensor, Tensor, Tensor]:
    """(index, order, bounds) of 700 positions in 3 rows, one number of which is wrong."""
    index = torch.arange(700) % 3  # rows 0, 1, 2 have 234, 233, 233 positions
    order, bounds = sorted_positions(index, 3)
    which, at, value = FAULTS[fault]
    target = order if which == "order" else bounds
    assert int(target[at]) != value
    target[at] = value
    return index, order, bounds


def assert_a_kernel_refuses(code: str, *arguments: str, message: str = "samebits: ") -> None:
    """Run ``code`` in a process of its own, because an assertion of the device ends its context. It must not get to its end."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")])
    program = f"{code}\ntorch.cuda.synchronize()\nprint('came through')\n"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "came through" not in output, output[-2000:]
    assert message in output, output[-2000:]
