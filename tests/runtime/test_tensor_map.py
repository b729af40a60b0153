"""What the copy engine cannot read is refused before the driver is asked, with the rule that is broken."""

from __future__ import annotations

import pytest
import torch

from samebits.runtime.tensor_map import check

BF16 = torch.bfloat16


def test_what_the_engine_reads() -> None:
    check(4096, BF16, (3, 128), (136, 1), (256, 64), swizzle=True)
    check(16, torch.float32, (1, 2**24), (2**24, 1), (1, 32), swizzle=True)
    check(16, BF16, (5, 7, 128), (1024, 128, 1), (1, 64, 128), swizzle=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((8, BF16, (3, 128), (128, 1), (64, 64), True), "multiples of 16 bytes"),
        ((16, BF16, (3, 127), (127, 1), (64, 64), True), "multiples of 16 bytes"),
        ((16, BF16, (3, 128), (1, 3), (64, 64), True), "last axis must be dense"),
        ((16, BF16, (128,), (1,), (64,), True), "2 to 5 axes"),
        ((16, BF16, (3, 128), (128, 1), (64,), True), "same 2 to 5 axes"),
        ((16, BF16, (3, 128), (128, 1), (257, 64), True), "1 to 256 elements"),
        ((16, BF16, (3, 128), (128, 1), (64, 32), True), "128 bytes wide, not 64"),
        ((16, BF16, (3, 128), (128, 1), (64, 4), False), "multiple of 16 bytes, not 8"),
        ((16, BF16, (3, 128), (0, 1), (64, 64), True), "beyond a tensor map"),
        ((16, BF16, (0, 128), (128, 1), (64, 64), True), "beyond a tensor map"),
        ((16, BF16, (3, 128), (2**39, 1), (64, 64), True), "beyond a tensor map"),
    ],
)
def test_what_it_does_not_read_is_refused(given: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(*given)  # type: ignore[arg-type]


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no tensor map of torch\.int64"):
        check(16, torch.int64, (3, 128), (128, 1), (64, 64), swizzle=True)
