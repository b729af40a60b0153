"""Why a replaced module differs from the class, found by changing one thing at a time and counting what moves.

Each step starts from the contract and takes one habit of the class over; the last step must arrive at the class's own
bits. What it leaves is reported as unexplained, not assumed away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.exact import fold
from samebits.models.deepseek_v4 import known
from samebits.models.difference import count_differing
from samebits.registry import operator


@dataclass(frozen=True)
class Step:
    habit: str
    """What the class does and the contract does not."""
    moved: int
    """Elements whose bits this step changed, at the module's output."""


@dataclass(frozen=True)
class Causes:
    module: str
    elements: int
    steps: tuple[Step, ...]
    unexplained: int
    """Elements that still differ from the class after the last step."""


def of_collapse(name: str, pre: Tensor, streams: Tensor, ours: Tensor, theirs: Tensor) -> Causes:
    """pre (..., 4) FP32, streams (..., 4, D) BF16; ours and theirs (..., D) BF16 from the same pre and streams."""
    in_order = fold.left_fold(pre[..., None] * streams.float(), -2).bfloat16()
    step = Step("adds the streams one after the other, ((p0 + p1) + p2) + p3", count_differing(in_order, ours))
    return Causes(name, ours.numel(), (step,), count_differing(in_order, theirs))


def of_norm(name: str, x: Tensor, norm: Any, contract: str, ours: Tensor, theirs: Tensor) -> Causes:
    """x, ours and theirs (..., D) BF16, theirs after the cast to BF16; norm is the class's module."""
    gamma, eps = norm.weight, norm.variance_epsilon
    rstd = operator("rmsnorm_residual").forward(x, gamma, eps=eps, contract=contract)[2]
    library = torch.rsqrt(x.float().square().mean(-1) + eps)
    steps = []
    here = ours
    if known.norm_rounds_before_weight():
        rounded = _three_roundings(x, gamma, rstd)
        steps.append(Step("rounds x * rstd to BF16 before the weight", count_differing(rounded, here)))
        here, last = rounded, _three_roundings(x, gamma, library)
    else:
        last = ((x.float() * library[..., None]) * gamma).bfloat16()
    rows = int((rstd != library).sum())
    steps.append(
        Step(
            f"sums the squares in the order of torch.mean (rstd differs in {rows} of {rstd.numel()} rows)",
            count_differing(last, here),
        )
    )
    return Causes(name, ours.numel(), tuple(steps), count_differing(last, theirs))


def _three_roundings(x: Tensor, gamma: Tensor, rstd: Tensor) -> Tensor:
    return (gamma * (x.float() * rstd[..., None]).bfloat16()).bfloat16()
