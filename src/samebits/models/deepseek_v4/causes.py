"""Why a site differs from the class, found by changing one thing at a time and counting what moves.

Each step starts from the contract and takes one habit of the class over; the last step must arrive at the class's own
bits. What it leaves is reported as unexplained, not assumed away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samebits.exact import fold
from samebits.models.deepseek_v4 import known
from samebits.models.deepseek_v4.sites import Options, Site, Tensors, class_mix
from samebits.models.difference import count_differing
from samebits.nn.families import contract_of
from samebits.nn.gain import SEGMENTS, expand_gain
from samebits.ops.hc_split_sinkhorn import reference as split
from samebits.ops.mhc_post import reference as mhc_post
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


Stage = tuple[str, Tensors]
"""A habit, and what the site returns once it is taken over; the first one is the contract itself."""

_RMS = "computes the RMS as sqrt(mean + eps), the published profile as sqrt(mean) + eps"
_LIBRARY = "normalises the streams before it projects them, and the library decides the order of the dot product"
_SPLIT = "takes softmax and Sinkhorn sums in the library's order, and sigmoids of dense tensors, where the CPU has another code"
_IN_TURN = "adds the streams one after the other, ((p0 + p1) + p2) + p3"


def explain(site: Site, rows: Tensors, options: Options, theirs: Tensors) -> list[Causes]:
    """One entry for each output of the site; ``theirs`` are the class's outputs, as rows."""
    stages = {"connection": _connection, "norm": _norm, "mix": _mix, "head": _head}[site.kind](site, rows, options)
    found = []
    for index, (name, expected) in enumerate(zip(site.outputs, theirs, strict=True)):
        values = [outputs[index] for _, outputs in stages]
        steps = tuple(
            Step(habit, count_differing(here, before))
            for (habit, _), before, here in zip(stages[1:], values, values[1:], strict=False)
        )
        moved = tuple(step for step in steps if step.moved) or steps[-1:]
        found.append(Causes(name, values[0].numel(), moved, count_differing(values[-1], expected)))
    return found


def _connection(site: Site, rows: Tensors, options: Options) -> list[Stage]:
    module, streams = site.module, rows[0]
    stages = [("", site.ours(rows, options))]
    contract = options.contracts["mhc_pre_norm"]
    if not contract.endswith("-dsv4"):
        changed = {**options.contracts, "mhc_pre_norm": f"{contract}-dsv4"}
        stages.append((_RMS, site.ours(rows, Options(changed, options.backend))))
    logits = _library_logits(streams, module.fn, module.input_norm.eps)
    logits = logits * expand_gain(module.scale, SEGMENTS) + module.base
    pre, post, comb = split.forward(logits)
    stages.append((_LIBRARY, (post, comb, _collapse(pre, streams))))
    pre, post, comb = (part.contiguous() for part in split.split(logits))
    pre, post = torch.sigmoid(pre) + module.hc_eps, 2 * torch.sigmoid(post)
    comb = _library_sinkhorn(comb, module.hc_eps, module.hc_sinkhorn_iters)
    stages.append((_SPLIT, (post, comb, _collapse(pre, streams))))
    stages.append((_IN_TURN, (post, comb, _collapse_in_turn(pre, streams))))
    return stages


def _head(site: Site, rows: Tensors, options: Options) -> list[Stage]:
    module, streams = site.module, rows[0]
    stages = [("", site.ours(rows, options))]
    contract = options.contracts["hyper_head"]
    if not contract.endswith("-dsv4"):
        changed = {**options.contracts, "hyper_head": f"{contract}-dsv4"}
        stages.append((_RMS, site.ours(rows, Options(changed, options.backend))))
    logits = _library_logits(streams, module.hc_fn, module.input_norm.eps) * module.hc_scale + module.hc_base
    pre = torch.sigmoid(logits) + module.eps
    stages.append((_LIBRARY, (_collapse(pre, streams),)))
    stages.append((_IN_TURN, (_collapse_in_turn(pre, streams),)))
    return stages


def _library_logits(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = streams.flatten(1).float()[
        :, None
    ]  # of the shape the class has, for which a library may choose another kernel
    normal = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return functional.linear(normal, weight)[:, 0]


def _library_sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _collapse(pre: Tensor, streams: Tensor) -> Tensor:
    return fold.tree4(pre[..., None] * streams.float(), -2).bfloat16()


def _collapse_in_turn(pre: Tensor, streams: Tensor) -> Tensor:
    return fold.left_fold(pre[..., None] * streams.float(), -2).bfloat16()


def _mix(site: Site, rows: Tensors, options: Options) -> list[Stage]:
    streams, y, comb, post = rows
    narrow_comb, narrow_post = comb.bfloat16(), post.bfloat16()
    narrow = mhc_post.forward(streams, y, narrow_comb.float(), narrow_post.float())
    mixed = fold.tree4(narrow_comb.float()[..., None] * streams.float()[..., :, None, :], -3).bfloat16()
    apart = narrow_post[..., None] * y[..., None, :] + mixed
    library = class_mix(*(row[:, None] for row in rows))[:, 0]
    return [
        ("", site.ours(rows, options)),
        ("rounds post and comb to BF16 first", (narrow,)),
        ("rounds the mixed streams, the sublayer's part and their sum to BF16, one after the other", (apart,)),
        ("leaves the order of the matmul over the streams to the library", (library,)),
    ]


def _norm(site: Site, rows: Tensors, options: Options) -> list[Stage]:
    x, gamma, eps = rows[0], site.module.weight, site.module.variance_epsilon
    (ours,) = site.ours(rows, options)
    contract = contract_of("rmsnorm_residual", options.contracts)
    rstd = operator("rmsnorm_residual").forward(x, gamma, eps=eps, contract=contract, backend=options.backend)[2]
    library = torch.rsqrt(x.float().square().mean(-1) + eps)
    changed = int((rstd != library).sum())
    order = f"sums the squares in the order of torch.mean (rstd differs in {changed} of {rstd.numel()} rows)"
    if known.norm_rounds_before_weight():
        rounds = "rounds x * rstd to BF16 before the weight"
        return [
            ("", (ours,)),
            (rounds, (_three_roundings(x, gamma, rstd),)),
            (order, (_three_roundings(x, gamma, library),)),
        ]
    return [("", (ours,)), (order, (((x.float() * library[..., None]) * gamma).bfloat16(),))]


def _three_roundings(x: Tensor, gamma: Tensor, rstd: Tensor) -> Tensor:
    return (gamma * (x.float() * rstd[..., None]).bfloat16()).bfloat16()


def total(causes: Sequence[Causes]) -> dict[str, Any]:
    """Elements moved by each habit over all sites, most first."""
    moved: dict[str, int] = {}
    for cause in causes:
        for step in cause.steps:
            habit = step.habit.partition(" (rstd")[0]  # the order of torch.mean, whatever it does to how many rows
            moved[habit] = moved.get(habit, 0) + step.moved
    return dict(sorted(moved.items(), key=lambda item: -item[1]))
