"""What cuBLAS does at the products of a MiniMax-H3 block: where its bits are those of one chain, and where a row's depend on M.

Observations of a library on an H200, and no promise of ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ops.linear_shapes import GPU_ROWS, drawn_on_gpu
from torch.nn import functional as F

from samebits import linear
from samebits.exact.bits import bits
from samebits.ops.linear.peers import cublaslt_without_split_k
from samebits.ops.linear.targets import SHAPES

pytestmark = pytest.mark.gpu
ROWS = tuple(rows for rows in GPU_ROWS if rows <= 3160)


@pytest.fixture(params=["default", "without split-K"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before, library = [getattr(matmul, name) for name in names], torch.backends.cuda.preferred_blas_library()
    if request.param != "default":
        cublaslt_without_split_k()
    yield request.param
    torch.backends.cuda.preferred_blas_library(library)
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@pytest.mark.parametrize("shape", SHAPES)
def test_where_cublas_has_the_bits_of_one_chain(shape: str, mode: str) -> None:
    n, k = SHAPES[shape]
    x, weight, _ = drawn_on_gpu("random", max(ROWS), n, k)
    ours, whole = linear(x, weight, backend="cuda"), F.linear(x, weight)
    chain, itself = {}, {}
    for rows in ROWS:
        theirs = F.linear(x[:rows], weight)
        chain[rows] = int((bits(theirs) != bits(ours[:rows])).sum())
        itself[rows] = int((bits(theirs) != bits(whole[:rows])).any(1).sum())
    if folder := os.environ.get("SAMEBITS_RECORDS"):  # a line of the record, in this folder
        line = {"shape": shape, "N": n, "K": k, "mode": mode, "differing_from_chain": chain, "rows_that_differ": itself}
        with (Path(folder) / "linear_cublas.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    first = {"default": {"qkv": 16, "o": 1, "gate_up": 1, "down": 264}[shape], "without split-K": 8}[mode]
    assert not any(count for rows, count in chain.items() if rows >= first), chain
