"""What ``fp32_linear`` is compared with."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from samebits.bench import modes
from samebits.bench.peers import Peer


def library(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """cuBLAS in FP32, whose kernel and order depend on the number of rows."""
    return (functional.linear(x, weight, bias),)


PEERS = (
    Peer("F.linear", library, modes=modes.FP32_GEMM),
    Peer("torch.compile", library, compiled=True),
)
