"""Implementations with one planted fault each. Every check must notice the fault that is its business, and only that."""

from __future__ import annotations

import torch

from samebits.exact import fold
from samebits.ops.h_aggregate import reference as aggregate
from samebits.ops.rmsnorm_residual import reference as norm

EPS = 1e-6


def h_aggregate(forward=aggregate.forward, grad_pre=None, grad_residual=aggregate.backward_residual):
    """``h_aggregate`` with one part replaced."""
    grad_pre = grad_pre or (lambda grad, residual: aggregate.backward_pre(grad, residual, "ascending"))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, pre, residual):
            ctx.save_for_backward(pre, residual)
            return forward(pre, residual)

        @staticmethod
        def backward(ctx, grad):
            pre, residual = ctx.saved_tensors
            return grad_pre(grad, residual), grad_residual(grad, pre).bfloat16()

    return lambda pre, residual: Function.apply(pre, residual)


def rmsnorm_residual(forward=None, grad_gamma=norm.backward_gamma):
    """``rmsnorm_residual`` with one part replaced."""
    forward = forward or (lambda x, gamma: norm.forward(x, gamma, EPS, "ascending"))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gamma):
            y, rstd = forward(x, gamma)
            ctx.save_for_backward(x, gamma, rstd)
            return y, x.clone()

        @staticmethod
        def backward(ctx, grad_y, grad_residual):
            x, gamma, rstd = ctx.saved_tensors
            grad_x = norm.backward_x(grad_y, grad_residual, x, gamma, rstd, "ascending").bfloat16()
            return grad_x, grad_gamma(grad_y, x, rstd)

    return lambda x, gamma: Function.apply(x, gamma)


def _terms(grad, residual):
    return grad.float()[..., None, :] * residual.float()


# --- right --------------------------------------------------------------------------------------------------------------

right = h_aggregate()
right_norm = rmsnorm_residual()

# --- right values, wrong bits: only the contract's reference can tell -----------------------------------------------------

descending = h_aggregate(grad_pre=lambda grad, residual: fold.left_fold(_terms(grad, residual).flip(-1), -1))


def _fused(grad_y, x, rstd):
    """The fold of gamma's gradient with fused multiply-adds: the product is not rounded before it is added."""
    acc = torch.zeros(x.shape[-1])
    for product, scale in zip(grad_y.double() * x.double(), rstd.double(), strict=True):
        acc = (acc.double() + product * scale).float()
    return acc


fused_multiply_add = rmsnorm_residual(grad_gamma=_fused)

# --- wrong values, invariant ----------------------------------------------------------------------------------------------


def _without_tail(pre, residual):
    hidden = aggregate.forward(pre, residual)
    hidden[..., -1] = 0
    return hidden


skipped_tail = h_aggregate(forward=_without_tail)
skipped_tail_of_gradient = h_aggregate(
    grad_pre=lambda grad, residual: fold.left_fold(_terms(grad, residual)[..., :-1], -1)
)
doubled_gradient = h_aggregate(grad_residual=lambda grad, pre: 2 * aggregate.backward_residual(grad, pre))
missing_gamma = rmsnorm_residual(forward=lambda x, gamma: norm.forward(x, torch.ones_like(gamma), EPS, "ascending"))

# --- right values, not invariant --------------------------------------------------------------------------------------------


def _split_by_batch(grad, residual):
    terms = _terms(grad, residual)
    if len(terms) <= 16:
        return fold.left_fold(terms, -1)
    half = terms.shape[-1] // 2
    return fold.left_fold(terms[..., :half], -1) + fold.left_fold(terms[..., half:], -1)


def _rounded_in_large_batches(pre, residual):
    products = pre[..., None] * residual.float()
    if len(products) > 16:
        products = products.bfloat16().float()
    return fold.tree4(products, -2).bfloat16()


def _first_row_differs(pre, residual):
    hidden = aggregate.forward(pre, residual)
    hidden.view(torch.int16)[:1] ^= 1
    return hidden


def _leaks_between_rows(pre, residual):
    return (aggregate.forward(pre, residual).float() + 0 * residual.float().sum()).bfloat16()


def _random(pre, residual):
    hidden = aggregate.forward(pre, residual)
    hidden.view(torch.int16)[:, 3] ^= torch.randint(0, 2, (len(hidden),), dtype=torch.int16)
    return hidden


batch_dependent_split = h_aggregate(grad_pre=_split_by_batch)
batch_dependent_rounding = h_aggregate(forward=_rounded_in_large_batches)
position_dependent = h_aggregate(forward=_first_row_differs)
leaking = h_aggregate(forward=_leaks_between_rows)
random_bits = h_aggregate(forward=_random)


def _library_sum(grad_y, x, rstd):
    return ((grad_y.float() * x.float()) * rstd[:, None]).flip(0).sum(0)


other_order_over_rows = rmsnorm_residual(grad_gamma=_library_sum)

# --- no gradient --------------------------------------------------------------------------------------------------------------


def not_differentiable(pre, residual):
    return aggregate.forward(pre.detach(), residual.detach())


def needs_multiple_of_seven(x):
    if len(x) % 7:
        raise RuntimeError("rows must be a multiple of seven")
    return x * 2


# --- a foreign operator that brings its own inputs ---------------------------------------------------------------------------


def scaled_rows(table, index, scale):
    return table[index] * scale


def samebits_inputs(rows, seed, device, dtype):
    generator = torch.Generator().manual_seed(seed)
    return {
        "table": torch.randn(9, 24, generator=generator).to(device, dtype),
        "index": (torch.arange(rows) % 9).to(device),
        "scale": 1.25,
    }, ["index"]
