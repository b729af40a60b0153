"""Defines the bits of ``h_aggregate``. One FP32 rounding per written operation; runs on any device."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import fold

_FOLD_OVER_D = {"ascending": lambda terms: fold.left_fold(terms, -1), "tree256": fold.tree256}


def forward(pre: Tensor, residual: Tensor) -> Tensor:
    """hidden[d] = bf16( (pre0*r0 + pre1*r1) + (pre2*r2 + pre3*r3) ), the same for every contract. FP32 before the cast."""
    products = pre[..., None] * residual.float()
    return fold.tree4(products, -2).bfloat16()


def backward_residual(grad_hidden: Tensor, pre: Tensor) -> Tensor:
    """grad_residual[i, d] = pre[i] * grad_hidden[d], FP32."""
    return pre[..., None] * grad_hidden.float()[..., None, :]


def backward_pre(grad_hidden: Tensor, residual: Tensor, contract: str) -> Tensor:
    """grad_pre[i] = sum_d grad_hidden[d] * residual[i, d] in the contract's order, FP32."""
    return _FOLD_OVER_D[contract](grad_hidden.float()[..., None, :] * residual.float())


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    if not call.backward:
        results["hidden"].copy_(forward(inputs["pre"], inputs["residual"]))
        return
    if "grad_residual" in results:
        results["grad_residual"].copy_(backward_residual(inputs["grad_hidden"], inputs["pre"]))
    if "grad_pre" in results:
        results["grad_pre"].copy_(backward_pre(inputs["grad_hidden"], inputs["residual"], call.contract))
