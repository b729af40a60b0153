"""Tests that need hardware are deselected where it is missing; a skip would look like a test that was thought of."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("samebits.verify.conformance")

MARKS = ("gpu", "multi_gpu", "big")
KEPT = 2 * 2**30
"""Bytes of GPU memory that a process may keep between tests: others run beside it."""


@pytest.fixture(autouse=True)
def no_hoard_of_gpu_memory() -> Iterator[None]:
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker(name) for item in items for name in MARKS):
        return
    import torch

    for item in items:  # two of them at once would not fit
        if item.get_closest_marker("big"):
            item.add_marker(pytest.mark.xdist_group("big"))
    for item in items:  # one worker compiles what all patterns of values share, instead of every worker the same
        if item.name.startswith("test_bits_") and "triton" in item.name.partition("[")[2]:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("[")[0]))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = torch.cuda.get_device_properties(0).total_memory if count else 0
    here = {"gpu": count >= 1, "multi_gpu": count >= 2, "big": memory >= 80 * 10**9}
    left_out = [item for item in items if any(item.get_closest_marker(name) and not ok for name, ok in here.items())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        chosen = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in chosen]
