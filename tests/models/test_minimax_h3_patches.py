"""Rows of patches in the order of diffusers' own pipeline, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samebits.exact.bits import digest
from samebits.models.minimax_h3.patches import pack_video, unpack_video

CASES = [
    ((1, 24, 5, 4, 6), (1, 2, 2)),
    ((2, 3, 4, 6, 10), (2, 3, 5)),
    ((3, 1, 1, 1, 1), (1, 1, 1)),
    ((1, 2, 0, 4, 4), (1, 2, 2)),
]


def _latents(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "patch"), CASES)
def test_rows_are_those_of_diffusers(shape: tuple[int, ...], patch: tuple[int, int, int], dtype: torch.dtype) -> None:
    from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

    latents = _latents(shape, dtype)
    rows = pack_video(latents, patch)
    assert rows.is_contiguous() and rows.dtype == dtype
    expected = patchify_video_latents(latents, patch)
    assert rows.shape == expected.shape and digest(rows) == digest(expected)
    assert digest(pack_video(latents.transpose(3, 4).contiguous().transpose(3, 4), patch)) == digest(rows)


@pytest.mark.parametrize(("shape", "patch"), CASES[:3])
def test_back_again(shape: tuple[int, ...], patch: tuple[int, int, int]) -> None:
    latents = _latents(shape)
    back = unpack_video(pack_video(latents, patch), shape[2:], patch)
    assert back.is_contiguous() and back.shape == latents.shape and digest(back) == digest(latents)


def test_order_of_rows_and_of_their_numbers() -> None:
    """The second row is one patch to the right; its second number is one column on, the fifth another channel."""
    rows = pack_video(_latents((1, 2, 1, 4, 6)))
    assert rows.shape == (6, 8)
    assert rows[1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]
    assert rows[3, 0] == 12


@pytest.mark.parametrize(("shape", "words"), [
    ((1, 2, 3, 4), r"expected \(B, C, T, H, W\)"),
    ((1, 2, 1, 3, 4), r"latents of \(1, 3, 4\) \(T, H, W\) are not whole patches of \(1, 2, 2\)"),
])  # fmt: skip
def test_pack_refuses(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_video(_latents(shape))


@pytest.mark.parametrize(("shape", "size", "words"), [
    ((7, 8), (1, 4, 6), r"expected \(B \* 6, C \* 4\)"),
    ((6, 6), (1, 4, 6), r"expected \(B \* 6, C \* 4\)"),
    ((6, 8, 1), (1, 4, 6), r"rows have shape \(6, 8, 1\)"),
    ((0, 8), (0, 4, 6), r"rows have shape \(0, 8\)"),
    ((6, 8), (1, 4, 5), "are not whole patches"),
    ((6, 8), (4, 6), "are not whole patches"),
])  # fmt: skip
def test_unpack_refuses(shape: tuple[int, ...], size: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unpack_video(_latents(shape), size)
