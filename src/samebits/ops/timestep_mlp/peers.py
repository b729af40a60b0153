"""What ``timestep_mlp`` is compared with."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from samebits.bench import modes
from samebits.bench.peers import Peer


def op_by_op(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor]:
    """As diffusers writes it: cuBLAS in FP32, whose kernel and order depend on the number of rows."""
    return (functional.linear(functional.silu(functional.linear(x, w1, b1)), w2, b2),)


PEERS = (
    Peer("diffusers", op_by_op, modes=modes.FP32_GEMM),
    Peer("torch.compile", op_by_op, compiled=True),
)
