"""The orders of ``fp32_gemm_rms``, contracts ``fast``: each spelled out once more, its edges, and its launch plans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from samebits.dispatch import Call, DeviceInfo
from samebits.exact.bits import bits
from samebits.exact.compare import same_bits
from samebits.exact.fma import fma
from samebits.exact.tensor_core import chain
from samebits.ops.fp32_gemm_rms import cuda_fast, fast, reference
from samebits.ops.fp32_gemm_rms.cuda_sums import Projection
from samebits.runtime.device import H200

CANONICAL = 0x7FC00000


def draw(rows: int, size: int, outputs: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator).bfloat16()
    return x, torch.randn(outputs, size, generator=generator) / 64


# --- pieces ------------------------------------------------------------------------------------------------------------


def test_pieces_add_up_and_truncate():
    words = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    values = words.view(torch.float32)
    values = values[values.isfinite() & (values.abs() >= 2.0**-110)]
    high, middle, low = (piece.double() for piece in fast.split(values))
    assert torch.equal(high + middle + low, values.double())
    assert (middle.abs() < high.abs() * 2.0**-7).all() and (low.abs() < high.abs() * 2.0**-15).all()
    assert (high.abs() <= values.double().abs()).all(), "truncated, not rounded"
    assert (middle != 0).any() and (low != 0).any()


def test_what_a_piece_cannot_hold():
    """BF16 ends at 2^-133."""
    values = torch.tensor([2.0**-133, 2.0**-134, 2.0**-126 + 2.0**-149, -(2.0**-133) * 3.5])
    kept = sum(piece.double() for piece in fast.split(values))
    assert kept.tolist() == [2.0**-133, 0.0, 2.0**-126, -(2.0**-133) * 3]


# --- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 300, 256 * 16, 256 * 17 + 5, 256 * 40])
def test_projection_spelled_out(size):
    x, weight = draw(2, size, 3)
    chunks = range(0, size, 256)
    length = -(-len(chunks) // 16)
    segments = [torch.zeros(2, 3) for _ in range(16)]
    for number, k in enumerate(chunks):
        high, middle, low = (chain(x[:, k : k + 256], piece[:, k : k + 256]) for piece in fast.split(weight))
        segments[number // length] = segments[number // length] + (high + (middle + low))
    s = segments
    left = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
    right = ((s[8] + s[9]) + (s[10] + s[11])) + ((s[12] + s[13]) + (s[14] + s[15]))
    assert same_bits(fast.project(x, weight), left + right)


@pytest.mark.parametrize("size", [1, 300, 256 * 33])
def test_squares_spelled_out(size):
    x, _ = draw(1, size, 1)
    row = torch.nn.functional.pad(x[0].float(), (0, -size % 256))
    length = -(-(row.numel() // 256) // 16)
    segments = torch.zeros(16)
    for number, chunk in enumerate(row.view(-1, 256)):
        p = [torch.zeros(()) for _ in range(4)]
        for k, value in enumerate(chunk):
            q = k % 8 // 2
            p[q] = fma(value, value, p[q])
        segments[number // length] += (p[0] + p[1]) + (p[2] + p[3])
    assert same_bits(fast.sum_of_squares(x), fast.tree(segments)[None])


def test_squares_are_not_rounded_before_they_are_added():
    """2^-150 alone is a tie that goes to zero; on top of one 2^-149 it is a tie that goes up."""
    x = torch.zeros(2, 2).bfloat16()
    x[0], x[1] = torch.tensor([2.0**-75 * 1.4140625, 2.0**-75]), torch.tensor([2.0**-75, 0.0])
    assert fast.sum_of_squares(x).tolist() == [2.0**-148, 0.0]


def test_parts_do_not_matter():
    """Subtrees of any number of parts, added as a tree, are the tree."""
    x, weight = draw(3, 256 * 40, 4)
    rows = fast._chunks(x)
    high, middle, low = (chain(rows, fast._chunks(piece)) for piece in fast.split(weight))
    leaves = fast.segments(high + (middle + low))
    for parts in (1, 2, 4, 8, 16):
        subtrees = torch.stack([fast.tree(part) for part in leaves.split(16 // parts)])
        assert same_bits(fast.tree(subtrees), fast.project(x, weight))
    folded = leaves[0]
    for leaf in leaves[1:]:
        folded = folded + leaf
    assert not same_bits(folded, fast.project(x, weight)), "another order must show"


def test_more_accurate_than_a_left_fold():
    x, weight = draw(16, 4096, 24)
    exact = x.double() @ weight.double().T
    ours = (fast.project(x, weight).double() - exact).square().mean()
    folded = (reference.project(x.float(), weight).double() - exact).square().mean()
    assert ours < folded
    squares = x.double().square().sum(1)
    off = ((fast.sum_of_squares(x).double() - squares) / squares).abs().max()
    assert off < 2.0**-22


def test_rows_do_not_see_each_other():
    x, weight = draw(9, 1000, 5)
    together = fast.project(x, weight), fast.sum_of_squares(x)
    for t in range(9):
        assert same_bits(fast.project(x[t : t + 1], weight)[0], together[0][t])
        assert same_bits(fast.sum_of_squares(x[t : t + 1])[0], together[1][t])


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), 3e38])
def test_not_finite_is_one_nan(bad):
    x, weight = draw(3, 600, 4)
    clean = fast.project(x, weight)
    x[1, 5], x[1, 300] = bad, bad
    weight[:, 5], weight[:, 300] = 4.0, 4.0
    got = fast.project(x, weight)
    assert (bits(got[1]) == CANONICAL).all()
    assert got[0].isfinite().all() and got[2].isfinite().all()
    weight[2, 7] = bad if bad != 3e38 else float("inf")
    assert (bits(fast.project(x, weight)[:, 2]) == CANONICAL).all()
    assert clean.isfinite().all()


# --- gradients ---------------------------------------------------------------------------------------------------------


def test_fma_chain_spelled_out():
    generator = torch.Generator().manual_seed(3)
    grad, weight = torch.randn(4, 7, generator=generator), torch.randn(7, 50, generator=generator)
    acc = torch.zeros(4, 50)
    for n in range(7):
        acc = fma(grad[:, n : n + 1].expand(4, 50), weight[n].expand(4, 50), acc)
    assert same_bits(fast.fma_chain(grad, weight), acc)


def rows_of(count: int, seed: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(count, 5, generator=generator)
    x = torch.randn(count, 40, generator=generator).bfloat16()
    return grad, x, torch.randn(5, 40, generator=generator)


@pytest.mark.parametrize("count", [1, 255, 256, 600])
def test_grad_weight_spelled_out(count):
    grad, x, start = rows_of(count)
    acc = start
    for first in range(0, count, 256):
        pieces = [piece[first : first + 256] for piece in fast.split(grad)]
        high, middle, low = (chain(piece.T.contiguous(), x[first : first + 256].T.contiguous()) for piece in pieces)
        acc = acc + (high + (middle + low))
    assert same_bits(fast.project_rows(grad, x, start), acc)


def test_grad_weight_continues_after_whole_chunks():
    grad, x, start = rows_of(700)
    whole = fast.project_rows(grad, x, start)

    def cut(at):
        return fast.project_rows(grad[at:], x[at:], fast.project_rows(grad[:at], x[:at], start))

    assert same_bits(cut(256), whole) and same_bits(cut(512), whole)
    assert not same_bits(cut(300), whole), "a chunk that is cut is another sum"


def test_grad_weight_without_rows_and_from_minus_zero():
    grad, x, start = rows_of(4)
    assert same_bits(fast.project_rows(grad[:0], x[:0], start), start)
    zero = fast.project_rows(grad * 0, x, torch.full((5, 40), -0.0))
    assert (bits(zero) == 0).all()


def test_grad_weight_of_what_is_not_finite_is_one_nan():
    grad, x, start = rows_of(300)
    x[280, 3] = float("inf")
    got = fast.project_rows(grad, x, start)
    assert (bits(got[:, 3]) == CANONICAL).all() and got[:, :3].isfinite().all()


def test_grad_weight_is_more_accurate_than_a_left_fold():
    grad, x, start = rows_of(2000)
    exact = start.double() + grad.double().T @ x.double()
    ours = (fast.project_rows(grad, x, start).double() - exact).square().mean()
    folded = (reference.backward_weight(grad, x, start, "ascending").double() - exact).square().mean()
    assert ours < folded


# --- plans -------------------------------------------------------------------------------------------------------------

PROJECTIONS = [
    Projection("fast", rows, outputs, streams, width, "bfloat16", width % 8 == 0, width % 8 == 0, H200)
    for rows in (1, 16, 64, 65, 128, 500, 1024, 4096, 8192, 32768, 100_000)
    for outputs in (1, 4, 24, 31)
    for streams, width in ((4, 4096), (4, 7168), (1, 16384), (1, 17), (2, 1500))
]


@pytest.mark.parametrize("given", PROJECTIONS, ids=lambda p: f"T{p.rows}-N{p.outputs}-{p.streams}x{p.width}")
def test_every_plan_covers_everything_and_fits(given):
    plans = cuda_fast.sums_plans(given)
    assert plans == cuda_fast.sums_plans(dataclasses.replace(given)) and len(set(plans)) == len(plans)
    for plan in plans:
        *before, step = plan.launches
        macros = dict(step.kernel.defines)
        assert step.kernel.entry == "fast_sums" and len(before) == macros["SPLIT"]
        tokens, outputs = 16 * macros["MT"] * macros["WARPS"], 8 * macros["NT"]
        assert step.grid[0] * tokens >= given.rows > (step.grid[0] - 1) * tokens
        assert step.grid[1] % plan.parts == 0 and step.grid[1] // plan.parts * outputs >= given.outputs
        assert plan.parts in (1, 2, 4, 8, 16) and step.arguments == (plan.parts,)
        assert step.block == 32 * macros["WARPS"] * macros["TEAMS"] <= 1024
        assert macros["BLOCKS"] * (step.shared + 1024) <= H200.shared_bytes + 1024
        assert macros["VEC"] == (8 if given.x_aligned else 1)
    for weight_plan in cuda_fast.grad_weight_plans(given):
        (step,) = weight_plan.launches
        macros = dict(step.kernel.defines)
        columns = 16 * macros["MT"] * macros["WARPS"]
        assert step.grid[0] * columns >= given.size > (step.grid[0] - 1) * columns
        assert step.grid[1] * 8 * macros["NT"] >= given.outputs
        assert step.shared <= H200.shared_bytes


def test_every_multiprocessor_has_a_block_before_parts_are_joined():
    def best(rows):
        given = Projection("fast", rows, 24, 4, 4096, "bfloat16", True, True, H200)
        plan = cuda_fast.sums_plans(given)[0]
        grid = plan.launches[-1].grid
        return plan.parts, grid[0] * grid[1]

    assert best(1)[0] == 16 and best(1)[1] >= 16
    for rows in (4096, 8192, 32768):
        assert best(rows)[1] >= 0.9 * H200.multiprocessors
    assert best(100_000)[0] < 16


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_other_tensor_cores_are_refused(arch):
    call = Call("fp32_gemm_rms", False, "fast-dsv4", 1, (), (), (), "float32", DeviceInfo("cuda", arch, 100))
    refusal = cuda_fast.refuses(call)
    assert refusal is not None and "9.0" in refusal and str(arch / 10) in refusal and "'fast-dsv4'" in refusal
    assert cuda_fast.refuses(dataclasses.replace(call, contract="ascending")) is None
    assert cuda_fast.refuses(dataclasses.replace(call, device=H200)) is None
