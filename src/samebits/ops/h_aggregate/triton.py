from __future__ import annotations
import triton
import triton.language as tl
from samebits.runtime.triton_launch import halving_tree, kernel, launch, left_fold, load, store


@kernel
def _forward(  # type: ignore[no-untyped-def]
    pre, residual, hidden, pre_row: tl.int64, residual_row: tl.int64, residual_stream: tl.int64, T: tl.int64, D: tl.int32,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = row < T
    pre += row * pre_row
    residual += row * residual_row
    p0 = tl.load(pre, here, 0.0) * load(residual, here, d, D, ALIGNED).to(tl.float32)
    p1 = tl.load(pre + 1, here, 0.0) * load(residual + residual_stream, here, d, D, ALIGNED).to(tl.float32)
    p2 = tl.load(pre + 2, here, 0.0) * load(residual + 2 * residual_stream, here, d, D, ALIGNED).to(tl.float32)
    p3 = tl.load(pre + 3, here, 0.0) * load(residual + 3 * residual_stream, here, d, D, ALIGNED).to(tl.float32)
    store(hidden + row * D, here, d, D, (p0 + p1) + (p2 + p3), ALIGNED)


@triton.jit
def _products(grad_hidden, pre, residual, grad_residual, row, d, T, D, grad_row, pre_row, residual_row, residual_stream, ALIGNED: tl.constexpr):
    i = tl.arange(0, 4)[None, :, None]
    d = d[None, None, :]
    row = row[:, None, None]
    here = row < T
    every = here & (i < 4)
    upstream = load(grad_hidden + row * grad_row, here, d, D, ALIGNED).to(tl.float32)
    if grad_residual is not None:
        gain = tl.load(pre + row * pre_row + i, every, 0.0)
        store(grad_residual + (row * 4 + i) * D, every, d, D, gain * upstream, ALIGNED)
    return upstream * load(residual + row * residual_row + i * residual_stream, every, d, D, ALIGNED).to(tl.float32)

@kernel
def _backward_ascending(
    grad_hidden, pre, residual, grad_pre, grad_residual, grad_row: tl.int64, pre_row: tl.int64, residual_row: tl.int64, residual_stream: tl.int64, T: tl.int64, D: tl.int32,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    CHAINS: tl.constexpr = ROWS * 4
    acc = tl.zeros((CHAINS,), tl.float32)
    for start in tl.range(0, D, WIDTH, num_stages=STAGES):
        terms = _products(grad_hidden, pre, residual, grad_residual, row, start + tl.arange(0, WIDTH), T, D, grad_row, pre_row, residual_row, residual_stream, ALIGNED)
        if grad_pre is not None:
            acc = left_fold(acc, tl.reshape(terms, (CHAINS, WIDTH)), CHAINS, WIDTH)
    if grad_pre is not None:
        chain = first * 4 + tl.arange(0, CHAINS)
        tl.store(grad_pre + chain, acc, mask=chain < T * 4)

@kernel
def _backward_tree256(
    grad_hidden, pre, residual, grad_pre, grad_residual, grad_row: tl.int64, pre_row: tl.int64, residual_row: tl.int64, residual_stream: tl.int64, T: tl.int64, D: tl.int32,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    CHAINS: tl.constexpr = ROWS * 4
    acc = tl.zeros((ROWS, 4, 256), tl.float32)
    for start in tl.range(0, D, 256):
        acc += _products(grad_hidden, pre, residual, grad_residual, row, start + tl.arange(0, 256), T, D, grad_row, pre_row, residual_row, residual_stream, ALIGNED)
    if grad_pre is not None:
        groups = halving_tree(tl.reshape(acc, (CHAINS * 8, 32)), CHAINS * 8, 32)
        total = halving_tree(tl.reshape(groups, (CHAINS, 8)), CHAINS, 8)
        chain = first * 4 + tl.arange(0, CHAINS)
        tl.store(grad_pre + chain, total, mask=chain < T * 4)
