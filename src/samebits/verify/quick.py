"""The sums that references are made of, in one call each: so that a reference can judge long rows and many batches.

A fold of 28672 terms is 28672 calls of torch, and a group of the tensor core's model more than a hundred. While
:func:`quick_folds` is open, numpy folds for tensors on a CPU, and a kernel of a few lines folds, fuses and chains for those on
a GPU: the same operations on the same operands in the same order. Tests hold both against the definitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from samebits.exact import fma as fused
from samebits.exact import fold, tensor_core


@contextlib.contextmanager
def quick_folds() -> Iterator[None]:
    """While open, the references' folds are quick; on a GPU also their fused multiply-adds and tensor-core chains."""
    usual = fold.left_fold, fused.rounded_once, tensor_core.block

    def left_fold(terms: Tensor, dim: int, start: Tensor | None = None) -> Tensor:
        return _gpu().left_fold(terms, dim, start) if terms.is_cuda else _accumulate(terms, dim, start)

    def rounded_once(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return _gpu().fma(a, b, c) if c.is_cuda else usual[1](a, b, c)

    def block(left: Tensor, right: Tensor, acc: Tensor) -> Tensor:
        return _gpu().block(left, right, acc) if acc.is_cuda else usual[2](left, right, acc)

    fold.left_fold, fused.rounded_once, tensor_core.block = left_fold, rounded_once, block
    try:
        yield
    finally:
        fold.left_fold, fused.rounded_once, tensor_core.block = usual


def _accumulate(terms: Tensor, dim: int, start: Tensor | None) -> Tensor:
    """``accumulate`` keeps every partial sum, so it cannot regroup; the +0 in front is where a fold starts."""
    rows = terms.movedim(dim, -1).numpy()
    begin = np.zeros((*rows.shape[:-1], 1), dtype=rows.dtype)
    if start is not None:
        begin = begin + start.numpy()[..., None]
    with np.errstate(all="ignore"):
        sums = np.add.accumulate(np.concatenate([begin, rows], axis=-1), axis=-1, dtype=rows.dtype)
    return torch.from_numpy(sums[..., -1].copy())


def _gpu():  # type: ignore[no-untyped-def]
    """Triton is imported where it is needed: a CPU has no use for it."""
    from samebits.verify import quick_gpu

    return quick_gpu
