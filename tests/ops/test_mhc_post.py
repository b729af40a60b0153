"""``mhc_post``: everything an operator must do, its edges, and the two orders spelled out once more."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from samebits import mhc_post, mhc_post_backward
from samebits.exact.bits import digest
from samebits.ops.mhc_post import peers, reference
from samebits.verify.conformance import Conformance
from samebits.verify.inputs import row_tensor


class TestMhcPost(Conformance):
    op = "mhc_post"


def drawn(rows: int, width: int, upstream: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """(grad_streams, residual, sublayer, comb, post)."""

    def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return row_tensor(f"test_mhc_post/{name}", range(rows), shape, dtype)

    return (
        tensor("grad_streams", (4, width), upstream),
        tensor("residual", (4, width), torch.bfloat16),
        tensor("sublayer", (width,), torch.bfloat16),
        tensor("comb", (4, 4), torch.float32),
        tensor("post", (4,), torch.float32),
    )


# --- the mix ----------------------------------------------------------------------------------------------------------


def test_the_sum_runs_over_the_first_index_of_comb() -> None:
    """Stream 1 goes to new stream 2 and nowhere else."""
    residual = torch.arange(4.0).view(1, 4, 1).bfloat16() + 1
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 2] = 3.0
    streams = mhc_post(residual, torch.zeros(1, 1).bfloat16(), comb, torch.ones(1, 4))
    assert streams.flatten().tolist() == [0.0, 0.0, 6.0, 0.0]
    grad_residual, *_ = mhc_post_backward(
        residual, residual, torch.zeros(1, 1).bfloat16(), comb, torch.ones(1, 4), wanted=(True, False, False, False)
    )
    assert grad_residual is not None
    assert grad_residual.flatten().tolist() == [0.0, 9.0, 0.0, 0.0]


def test_a_transposed_comb_shows() -> None:
    """Planted fault: every result that depends on the direction of comb changes, and an FP64 mix tells which one is right."""
    grad, residual, sublayer, comb, post = drawn(5, 40, torch.float32)
    flipped = comb.transpose(-1, -2).contiguous()
    right, wrong = mhc_post(residual, sublayer, comb, post), mhc_post(residual, sublayer, flipped, post)
    exact = torch.einsum("tij,tid->tjd", comb.double(), residual.double())
    exact += post.double()[..., None] * sublayer.double()[:, None, :]
    assert (right.double() - exact).abs().max() < 0.05
    assert (wrong.double() - exact).abs().max() > 0.5
    assert not torch.equal(reference.backward_residual(grad, comb), reference.backward_residual(grad, flipped))
    ours = reference.backward_comb(grad, residual, "ascending")
    assert not torch.allclose(ours, ours.transpose(-1, -2), atol=0.5)
    assert torch.allclose(ours.double(), torch.einsum("tid,tjd->tij", residual.double(), grad.double()), atol=1e-4)


def test_streams_are_paired_as_a_tree_and_the_sublayer_comes_last() -> None:
    residual = torch.tensor([2.0**27, 1.0, -(2.0**27), 1.0]).bfloat16().view(1, 4, 1)
    comb, post = torch.ones(1, 4, 4), torch.ones(1, 4)
    # (2^27 + 1) + (-2^27 + 1) = 0 in FP32; from left to right it would be 1.
    assert (mhc_post(residual, torch.zeros(1, 1).bfloat16(), comb, post) == 0).all()
    residual = torch.tensor([2.0**27, 1.0, 1.0, 1.0]).bfloat16().view(1, 4, 1)
    # ((2^27 + 1) + 2) - 2^27 = 0; with the sublayer beside stream 0 it would be 3.
    assert (mhc_post(residual, torch.full((1, 1), -(2.0**27)).bfloat16(), comb, post) == 0).all()
    # The same tree over the new streams in both mixes of the backward.
    grad = torch.tensor([2.0**27, 1.0, -(2.0**27), 1.0]).view(1, 4, 1)
    grad_residual, grad_sublayer, *_ = mhc_post_backward(
        grad, residual, torch.ones(1, 1).bfloat16(), comb, post, wanted=(True, True, False, False)
    )
    assert grad_residual is not None and grad_sublayer is not None
    assert (grad_residual == 0).all() and (grad_sublayer == 0).all()


def test_minus_zeros() -> None:
    """E9: the 4-tree has no +0 to start from, so it keeps -0; a fold over D starts at +0."""
    residual, comb, post = torch.full((2, 4, 3), -0.0).bfloat16(), torch.ones(2, 4, 4), torch.ones(2, 4)
    minus, plus = torch.full((2, 3), -0.0).bfloat16(), torch.zeros(2, 3).bfloat16()
    assert mhc_post(residual, minus, comb, post).signbit().all()
    assert not mhc_post(residual, plus, comb, post).signbit().any()
    ones = torch.ones(2, 3).bfloat16()
    for contract in ("ascending", "fast"):
        results = mhc_post_backward(residual, residual.abs() + 1, ones, comb, post, contract=contract)
        grad_residual, grad_sublayer, grad_comb, grad_post = (value for value in results if value is not None)
        assert grad_residual.signbit().all() and grad_sublayer.signbit().all()
        assert (grad_comb == 0).all() and not grad_comb.signbit().any()
        assert (grad_post == 0).all() and not grad_post.signbit().any()


def test_rounding_the_weights_first_gives_other_streams() -> None:
    """transformers rounds both weights to BF16 and then three times more: not this operator, and further from the truth."""
    _, residual, sublayer, comb, post = drawn(16, 4096)
    ours = mhc_post(residual, sublayer, comb, post)
    (theirs,) = peers.inline_bfloat16(residual, sublayer, comb, post)
    assert theirs.dtype == ours.dtype and theirs.shape == ours.shape
    assert (theirs != ours).float().mean() > 0.2
    exact = torch.einsum("tij,tid->tjd", comb.double(), residual.double())
    exact += post.double()[..., None] * sublayer.double()[:, None, :]
    assert (theirs.double() - exact).abs().mean() > 1.5 * (ours.double() - exact).abs().mean()
    (in_float,) = peers.op_by_op(residual, sublayer, comb, post)
    assert (in_float != ours).float().mean() < 0.01


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", ["ascending", "fast"])
def test_gradients_are_those_of_the_formula(contract: str) -> None:
    """Against autograd of the formula in FP64."""
    grad, *inputs = drawn(3, 136, torch.float32)
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    residual, sublayer, comb, post = leaves
    streams = torch.einsum("tij,tid->tjd", comb, residual) + post[..., None] * sublayer[:, None, :]
    expected = torch.autograd.grad(streams, leaves, grad.double())
    for ours, exact in zip(mhc_post_backward(grad, *inputs, contract=contract), expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("contract", ["ascending", "fast"])
@pytest.mark.parametrize("upstream", [torch.bfloat16, torch.float32])
def test_what_is_wanted_changes_no_byte(contract: str, upstream: torch.dtype) -> None:
    tensors = drawn(5, 136, upstream)
    for grad_dtype in (torch.float32, torch.bfloat16):
        everything = mhc_post_backward(*tensors, contract=contract, grad_dtype=grad_dtype)
        for wanted in itertools.product((True, False), repeat=4):
            some = mhc_post_backward(*tensors, contract=contract, grad_dtype=grad_dtype, wanted=wanted)
            for want, value, whole in zip(wanted, some, everything, strict=True):
                assert (value is not None) == want
                assert value is None or (whole is not None and digest(value) == digest(whole))


def test_only_what_is_needed_is_read() -> None:
    """NaN in an input that no wanted gradient depends on stays out of them."""
    grad, residual, sublayer, comb, post = drawn(2, 24)
    clean = mhc_post_backward(grad, residual, sublayer, comb, post)
    bad = [torch.full_like(tensor, float("nan")) for tensor in (residual, sublayer, comb, post)]
    needs = (
        2,
        3,
        0,
        1,
    )  # comb for grad_residual, post for grad_sublayer, residual for grad_comb, sublayer for grad_post
    for result, needed in enumerate(needs):
        given = [tensor if i == needed else bad[i] for i, tensor in enumerate((residual, sublayer, comb, post))]
        wanted = tuple(i == result for i in range(4))
        value, expected = mhc_post_backward(grad, *given, wanted=wanted)[result], clean[result]
        assert value is not None and expected is not None and torch.equal(value, expected)


# --- orders over D, written out in numpy ------------------------------------------------------------------------------


def ascending(terms: np.ndarray) -> np.float32:
    total = np.float32(0)
    for term in terms:
        total = np.float32(total + term)
    return total


def fast(terms: np.ndarray) -> np.float32:
    partial = [ascending(terms[[d for d in range(len(terms)) if d // 4 % 128 == u]]) for u in range(128)]
    for group in range(0, 128, 32):
        for half in (16, 8, 4, 2, 1):
            for u in range(group, group + half):
                partial[u] = np.float32(partial[u] + partial[u + half])
    return np.float32(np.float32(partial[0] + partial[64]) + np.float32(partial[32] + partial[96]))


@pytest.mark.parametrize("width", [1, 30, 700, 1100])
def test_the_orders_over_the_columns(width: int) -> None:
    grad, residual, sublayer, comb, post = drawn(1, width, torch.float32)
    left = torch.cat([residual[0], sublayer]).float().numpy()
    for contract, order in (("ascending", ascending), ("fast", fast)):
        _, _, grad_comb, grad_post = mhc_post_backward(grad, residual, sublayer, comb, post, contract=contract)
        assert grad_comb is not None and grad_post is not None
        found = torch.cat([grad_comb.flatten(), grad_post.flatten()]).numpy()
        expected = np.array([order(row * column) for row in left for column in grad[0].numpy()], dtype=np.float32)
        assert found.tobytes() == expected.tobytes()


def test_the_contracts_differ_where_their_orders_do() -> None:
    tensors = drawn(2, 4096)
    one, other = (mhc_post_backward(*tensors, contract=contract) for contract in ("ascending", "fast"))
    for index, same in enumerate((True, True, False, False)):
        left, right = one[index], other[index]
        assert left is not None and right is not None
        assert (digest(left) == digest(right)) == same
