"""``attention`` in FP64, for accuracy: softmax as the formula says, gradients by autograd. Shares nothing with the reference."""

from __future__ import annotations

import torch
from torch import Tensor

Documents = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""(queries, keys) bounds of each document."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, S_q, H, D) and lse (B, H, S_q), FP64, differentiable."""
    queries, keys = q.shape[1], k.shape[1]
    whole = (((0, queries), (0, keys)),)
    allowed = torch.zeros(queries, keys, dtype=torch.bool, device=q.device)
    for (q0, q1), (k0, k1) in documents if documents is not None else whole:
        square = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device)
        allowed[q0:q1, k0:k1] = square.tril((k1 - k0) - (q1 - q0)) if causal else square
    group = q.shape[2] // k.shape[2]
    kk, vv = (t.double().repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), kk) * scale
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    empty = ~allowed.any(-1)
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, vv), lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of :func:`forward`'s out, FP64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    out, _ = forward(q, k, v, causal, scale, documents)
    return torch.autograd.grad(out, (q, k, v), grad_out.double())
