"""The sums of a norm, one operation at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samebits.exact.fma import fma
from samebits.exact.norm_sums import squares_of_torch_norm, vector_tree
from samebits.verify import inputs


def _row(size: int) -> torch.Tensor:
    drawn = inputs.row_tensor("norm-sums", [1], (size,), torch.float32)[0]
    return drawn * drawn.abs()  # so that every addition rounds


def _halving(parts: list[np.float32]) -> np.float32:
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[i] + parts[i + half] for i in range(half)]
    return parts[0]


@pytest.mark.parametrize("size", [1, 3, 4, 12, 128, 130, 512, 513, 1300])
def test_the_sum_of_squares_is_the_threads_of_torch(size: int) -> None:
    """128 threads; thread t takes the vectors t, t + 128, ... of four; lanes by shuffles down, warps +2, then +1."""
    row = _row(size)
    threads = torch.zeros(128)
    for column in range(size):
        thread = column // 4 % 128
        threads[thread] = fma(row[column], row[column], threads[thread])
    warps = [_halving(list(threads.numpy()[w * 32 : w * 32 + 32])) for w in range(4)]
    expected = (warps[0] + warps[2]) + (warps[1] + warps[3])
    assert float(squares_of_torch_norm(row[None])[0]) == float(expected)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 256, 257, 1000])
def test_the_vector_tree_is_as_written(size: int) -> None:
    terms = _row(size).numpy()
    padded = np.concatenate([terms, np.zeros(-size % 256, np.float32)]).reshape(-1, 32, 8)
    total = np.float32(0)
    for group in padded:
        vectors = []
        for vector in group:
            acc = np.float32(0)
            for term in vector:
                acc = acc + term
            vectors.append(acc)
        total = total + _halving(vectors)
    assert float(vector_tree(torch.from_numpy(terms)[None])[0]) == float(total)


def test_the_orders_matter() -> None:
    row = _row(1300)
    assert float(squares_of_torch_norm(row[None])[0]) != float(vector_tree((row * row)[None])[0])
