"""What ``linear`` is compared with: the library, in its own modes, and a batch-invariant product in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench import modes
from samebits.bench.modes import Mode
from samebits.bench.peers import Peer


def library(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    """cuBLAS, by its own choice of kernels."""
    return (torch.nn.functional.linear(x, weight, bias),)


def persistent(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    from samebits.ops.linear import persistent as triton_product

    return (triton_product.linear(x, weight, bias),)


def cublaslt_without_split_k() -> None:
    """Set this process to cuBLASLt kernels that do not split K. The second switch of each pair forbids the split."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


NO_SPLIT_K = Mode("cuBLASLt without split-K", enable=f"{__name__}:cublaslt_without_split_k")

PEERS = (
    Peer("F.linear", library, modes=(*modes.BF16_GEMM, NO_SPLIT_K)),
    Peer("Triton persistent", persistent, needs=("triton",), cuda=True, gradients=()),
)
