"""The whole boundary written out from the references, rounding by rounding: what autograd must arrive at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from samebits.exact import fold
from samebits.ops.fp32_gemm_rms import reference as gemm_rms
from samebits.ops.h_aggregate import reference as h_aggregate
from samebits.ops.hc_split_sinkhorn import reference as split
from samebits.ops.mhc_post import reference as mhc_post
from samebits.ops.mhc_pre import reference as mhc_pre
from samebits.ops.rmsnorm_residual import reference as rmsnorm
from samebits.verify.inputs import parameter_tensor, row_tensor

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Leaves:
    """Everything a boundary differentiates in."""

    residual: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor
    gamma: Tensor

    def rows(self, first: int, last: int) -> Leaves:
        return replace(self, residual=self.residual[first:last].detach().requires_grad_())

    def fresh(self, frozen: tuple[str, ...] = ()) -> Leaves:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return Leaves(**{name: t.detach().clone().requires_grad_(name not in frozen) for name, t in named.items()})

    def grads(self) -> dict[str, Tensor | None]:
        return {f.name: getattr(self, f.name).grad for f in fields(self)}


def leaves(rows: int = 7, width: int = 12) -> Leaves:
    made = Leaves(
        residual=row_tensor("boundary/residual", range(rows), (4, width), BF16),
        weight=parameter_tensor("boundary/weight", (24, 4 * width), FP32) / 4,
        scale=parameter_tensor("boundary/scale", (3,), FP32, sample="weight"),
        bias=parameter_tensor("boundary/bias", (24,), FP32),
        gamma=parameter_tensor("boundary/gamma", (width,), FP32, sample="weight"),
    )
    return made.fresh()


def upstream(rows: int = 7, width: int = 12) -> Tensor:
    return row_tensor("boundary/upstream", range(rows), (4, width), BF16)


def sublayer(x: Tensor) -> Tensor:
    """Doubles and shifts: exact in BF16, and so is its gradient."""
    return 2 * x


def block(given: Leaves, upstream: Tensor, family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(new streams, gradient of each leaf) of one boundary with norm around :func:`sublayer`."""
    order_norm = "tree512" if family.startswith("fast") else "ascending"
    order_post = "fast" if family.startswith("fast") else "ascending"
    residual, weight, scale, bias, gamma = (getattr(given, f.name).detach() for f in fields(given))
    gain = torch.cat([scale[i].repeat(n) for i, n in enumerate((4, 4, 16))])
    values = mhc_pre.forward(residual, weight, gain, bias, EPS, family)
    hidden, post, comb, pre, logits, proj, r, q = values
    normalized, rstd = rmsnorm.forward(hidden, gamma, EPS, order_norm)
    y = sublayer(normalized)
    streams = mhc_post.forward(residual, y, comb, post)

    grad_y = mhc_post.backward_sublayer(upstream, post).bfloat16()
    grad_comb = mhc_post.backward_comb(upstream, residual, order_post)
    grad_post = mhc_post.backward_post(upstream, y, order_post)
    grad_normalized = sublayer(grad_y)
    grad_gamma = rmsnorm.backward_gamma(grad_normalized, hidden, rstd)
    grad_hidden = rmsnorm.backward_x(grad_normalized, None, hidden, gamma, rstd, order_norm)  # FP32, never rounded
    grad_pre = mhc_pre.backward_pre(grad_hidden, residual, family)
    grad_logits = split.backward(grad_pre, grad_post, grad_comb, logits)
    grad_gain = fold.left_fold(grad_logits * (r[:, None] * proj), 0)
    grad_scale = torch.stack([fold.left_fold(part, 0) for part in grad_gain.split([4, 4, 16])])
    scaled = grad_logits * gain
    grad_proj, grad_r = scaled * r[:, None], fold.left_fold(scaled * proj, -1)
    x = residual.flatten(1)
    controller_leg = gemm_rms.backward_x(grad_proj, grad_r, x, weight, r, q, family).view_as(residual)
    collapse_leg = h_aggregate.backward_residual(grad_hidden, pre)
    grads = {
        "residual": ((collapse_leg + controller_leg) + mhc_post.backward_residual(upstream, comb)).bfloat16(),
        "weight": gemm_rms.backward_weight(grad_proj, x, None, family),
        "scale": grad_scale,
        "bias": fold.left_fold(grad_logits, 0),
        "gamma": grad_gamma,
    }
    return streams, grads


def same(one: Tensor, other: Tensor) -> bool:
    kind = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[one.dtype]
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


def differing(ours: dict[str, Tensor | None], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if (mine := ours[name]) is None or not same(mine, value)]


Run = Callable[[Leaves], Tensor]
