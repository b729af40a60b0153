"""Few scales for many controller outputs: ``scale`` (3,) to ``gain`` (24,), and the ordered fold of the gradient back.

Both directions are torch ops of their own, so that no compiler takes the fold for a sum that it may reorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.autograd import refuse_second_derivative, refuse_tangents
from samebits.operator import LIBRARY

SEGMENTS = (4, 4, 16)
"""Controller outputs that share a scale: collapse weights, post weights, mixing matrix."""


def expand_gain(scale: Tensor, segments: Sequence[int] = SEGMENTS) -> Tensor:
    """scale (S,) FP32 to gain (sum(segments),): element s repeated ``segments[s]`` times.

    The gradient of an element is the left fold from +0 over its segment in ascending order. Tokens were folded before,
    when the gradient of the gain was made.
    """
    if scale.dtype != torch.float32 or tuple(scale.shape) != (len(segments),):
        raise ValueError(
            f"scale must be ({len(segments)},) float32 for segments {tuple(segments)}, "
            f"got {tuple(scale.shape)} {str(scale.dtype).removeprefix('torch.')}"
        )
    gain: Tensor = torch.ops.samebits.expand_gain(scale, list(segments))
    return gain


def fold_gain(grad: Tensor, segments: Sequence[int] = SEGMENTS) -> Tensor:
    """grad (sum(segments),) to (S,): the left fold of each segment from +0, ascending."""
    folded: Tensor = torch.ops.samebits.fold_gain(grad, list(segments))
    return folded


def _expand(scale: Tensor, segments: Sequence[int]) -> Tensor:
    return torch.cat([scale[i : i + 1].expand(size) for i, size in enumerate(segments)])


def _fold(grad: Tensor, segments: Sequence[int]) -> Tensor:
    # All segments side by side, short ones padded with +0: a sum that began at +0 is never -0, so no bit changes.
    padded = grad.new_zeros(max(segments), len(segments))
    for i, part in enumerate(grad.split(list(segments))):
        padded[: part.shape[0], i] = part
    acc = grad.new_zeros(len(segments))
    for terms in padded:
        acc += terms
    return acc


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, segments: Sequence[int]) -> Tensor:
        ctx.segments = segments
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.samebits.expand_gain(scale, segments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:  # the gradient went into a chain, which folds the segments at its end
            return None, None
        if torch.is_grad_enabled():
            refuse_second_derivative("expand_gain")
        return fold_gain(grad, ctx.segments), None


def _expand_autograd(scale: Tensor, segments: Sequence[int]) -> Tensor:
    refuse_tangents("expand_gain", (scale,))
    if torch.is_grad_enabled() and scale.requires_grad:
        return _Expand.apply(scale, segments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.samebits.expand_gain(scale, segments)


def _fold_autograd(grad: Tensor, segments: Sequence[int]) -> Tensor:
    if torch.is_grad_enabled() and grad.requires_grad:
        refuse_second_derivative("fold_gain")
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.samebits.fold_gain(grad, segments)


def _register() -> None:
    LIBRARY.define("expand_gain(Tensor scale, int[] segments) -> Tensor")
    LIBRARY.define("fold_gain(Tensor grad, int[] segments) -> Tensor")
    LIBRARY.impl("expand_gain", _expand, "CompositeExplicitAutograd")
    LIBRARY.impl("fold_gain", _fold, "CompositeExplicitAutograd")
    LIBRARY.impl("expand_gain", _expand_autograd, "Autograd")
    LIBRARY.impl("fold_gain", _fold_autograd, "Autograd")
    torch.library.register_fake(
        "samebits::expand_gain", lambda scale, segments: scale.new_empty(sum(segments)), lib=LIBRARY
    )
    torch.library.register_fake(
        "samebits::fold_gain", lambda grad, segments: grad.new_empty(len(segments)), lib=LIBRARY
    )


_register()
