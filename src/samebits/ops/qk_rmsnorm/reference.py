"""Defines the bits of ``qk_rmsnorm``: those of ``rmsnorm`` on the rows (position, head), in that order."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import segment_sums
from samebits.ops.rmsnorm.reference import gradient_of_x, normed, rstd_of, terms_of_weight


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y (T, N, D) in the dtype of x, rstd (T, N)) of x (T, N, D)."""
    heads = x.flatten(0, 1)
    rstd = rstd_of(heads, eps)
    return normed(heads, rstd, weight).to(x.dtype).view(x.shape), rstd.view(x.shape[:-1])


def backward(upstream: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, results: dict[str, Tensor]) -> None:
    """Write the wanted ``results``; ``upstream`` is the gradient of the normalised heads."""
    wide, heads, kept = upstream.float().flatten(0, 1), x.flatten(0, 1), rstd.flatten()
    if "grad_x" in results:
        results["grad_x"].copy_(gradient_of_x(wide, heads, weight, kept).view(x.shape))
    if "grad_weight" in results:
        partials = segment_sums.tile_sums_in_order(terms_of_weight(wide, heads, kept))
        results["grad_weight"].copy_(segment_sums.sum_of_all(partials))


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    if call.backward:
        backward(inputs["grad_y"], x, weight, inputs["rstd"], results)
        return
    y, rstd = forward(x, weight, scalars["eps"])
    results["y"].copy_(y)
    results["rstd"].copy_(rstd)
