"""What ``mhc_post`` is compared with: the expression of transformers' decoder layer, and the FP32 form step by step."""

from __future__ import annotations

from torch import Tensor

from samebits.bench import modes, tile_kernels
from samebits.bench.peers import Peer


def inline_bfloat16(residual: Tensor, sublayer: Tensor, comb: Tensor, post: Tensor) -> tuple[Tensor]:
    """As transformers 5.17 writes it: both weights rounded to BF16 first, then a BF16 matrix product, product and sum."""
    dtype = residual.dtype
    added = post.to(dtype).unsqueeze(-1) * sublayer.unsqueeze(-2)
    return (added + comb.to(dtype).transpose(-1, -2) @ residual,)


def op_by_op(residual: Tensor, sublayer: Tensor, comb: Tensor, post: Tensor) -> tuple[Tensor]:
    """The sum in FP32 with one rounding at the end: one PyTorch operation per step, intermediates in memory."""
    mixed = (comb.unsqueeze(-1) * residual.float().unsqueeze(-2)).sum(-3)
    return ((mixed + post.unsqueeze(-1) * sublayer.float().unsqueeze(-2)).bfloat16(),)


PEERS = (
    Peer("transformers", inline_bfloat16, modes=modes.BF16_GEMM),
    Peer("pytorch eager", op_by_op),
    Peer("torch.compile", op_by_op, compiled=True),
    Peer("TileKernels", tile_kernels.post, needs=tile_kernels.MODULES, cuda=True),
)
