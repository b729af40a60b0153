"""Defines the bits of ``mhc_post``. One FP32 rounding per written operation; runs on any device.

The mix contracts over the *first* index of ``comb``: destination stream j takes comb[0, j], ..., comb[3, j].
"""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import fold


def tree128(terms: Tensor) -> Tensor:
    """128 partials of 4-wide vectors; a halving tree inside each group of 32, then over the 4 groups, over the last axis."""
    partials = fold.strided_partials(terms, lanes=128, width=4)
    return fold.halving_tree(fold.halving_tree(partials.view(*partials.shape[:-1], 4, 32)))


_FOLD_OVER_D = {"ascending": lambda terms: fold.left_fold(terms, -1), "fast": tree128}


def forward(residual: Tensor, sublayer: Tensor, comb: Tensor, post: Tensor) -> Tensor:
    """streams[j, d] = bf16( ((c0j*r0 + c1j*r1) + (c2j*r2 + c3j*r3)) + post[j]*y ), the same for every contract."""
    mixed = fold.tree4(comb[..., None] * residual.float()[..., :, None, :], -3)
    return (mixed + post[..., None] * sublayer.float()[..., None, :]).bfloat16()


def backward_residual(grad_streams: Tensor, comb: Tensor) -> Tensor:
    """grad_residual[i, d] = (c_i0*g0 + c_i1*g1) + (c_i2*g2 + c_i3*g3), FP32."""
    return fold.tree4(comb[..., None] * grad_streams.float()[..., None, :, :], -2)


def backward_sublayer(grad_streams: Tensor, post: Tensor) -> Tensor:
    """grad_sublayer[d] = (post0*g0 + post1*g1) + (post2*g2 + post3*g3), FP32."""
    return fold.tree4(post[..., None] * grad_streams.float(), -2)


def backward_comb(grad_streams: Tensor, residual: Tensor, contract: str) -> Tensor:
    """grad_comb[i, j] = sum_d residual[i, d] * grad_streams[j, d] in the contract's order, FP32."""
    return _FOLD_OVER_D[contract](residual.float()[..., :, None, :] * grad_streams.float()[..., None, :, :])


def backward_post(grad_streams: Tensor, sublayer: Tensor, contract: str) -> Tensor:
    """grad_post[j] = sum_d sublayer[d] * grad_streams[j, d] in the contract's order, FP32."""
    return _FOLD_OVER_D[contract](sublayer.float()[..., None, :] * grad_streams.float())


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    if not call.backward:
        results["streams"].copy_(forward(*(inputs[name] for name in ("residual", "sublayer", "comb", "post"))))
        return
    upstream = inputs["grad_streams"]
    if "grad_residual" in results:
        results["grad_residual"].copy_(backward_residual(upstream, inputs["comb"]))
    if "grad_sublayer" in results:
        results["grad_sublayer"].copy_(backward_sublayer(upstream, inputs["post"]))
    if "grad_comb" in results:
        results["grad_comb"].copy_(backward_comb(upstream, inputs["residual"], call.contract))
    if "grad_post" in results:
        results["grad_post"].copy_(backward_post(upstream, inputs["sublayer"], call.contract))
