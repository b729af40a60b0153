"""What ``hc_split_sinkhorn`` is compared with. Same arithmetic in FP32; the orders of the four-term sums are the library's."""

from __future__ import annotations

from torch import Tensor

from samebits.bench.peers import Peer
from samebits.ops.hc_split_sinkhorn.reference import EPS, ITERATIONS


def op_by_op(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As a model file writes it: one PyTorch operation per step, the matrix in memory between them."""
    pre = logits[..., :4].sigmoid() + EPS
    post = 2 * logits[..., 4:8].sigmoid()
    comb = logits[..., 8:].unflatten(-1, (4, 4)).softmax(-1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return pre, post, comb


PEERS = (
    Peer("pytorch eager", op_by_op),
    Peer("torch.compile", op_by_op, compiled=True),
)
