"""What ``h_aggregate`` is compared with. Same arithmetic in FP32; the order of the backward sum is the library's own."""

from __future__ import annotations

from torch import Tensor

from samebits.bench.peers import Peer


def op_by_op(pre: Tensor, residual: Tensor) -> tuple[Tensor]:
    """The four-term sum as a model file writes it: one PyTorch operation per step, FP32 intermediates in memory."""
    return ((pre.unsqueeze(-1) * residual.float()).sum(-2).bfloat16(),)


PEERS = (
    Peer("pytorch eager", op_by_op),
    Peer("torch.compile", op_by_op, compiled=True),
)
