"""Prove my RMSNorm is batch-invariant: two norms that compute the same formula, of which one passes.

    python examples/batch_invariant_norm.py

The same from a terminal, for a function of yours; T marks the rows, the other sizes are yours:

    samebits check examples/batch_invariant_norm.py:tree_norm --shape T,256 --shape 256
"""

import torch
from torch import Tensor

import samebits

SHAPES = ["T,256", "256"]  # x (rows, width), weight (width,)


def tree_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Adds the squares by halving the row, whatever else is in the batch: the order of a sum depends on the width alone."""
    total = x * x
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return x * torch.rsqrt(total / x.shape[-1] + 1e-6) * weight


def split_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Cuts each row into eight parts while the batch is small, as kernels do that want to fill the GPU with few rows."""
    parts = 8 if x.shape[0] < 16 else 1
    total = (x * x).unflatten(-1, (parts, -1)).sum(-1).sum(-1, keepdim=True)
    return x * torch.rsqrt(total / x.shape[-1] + 1e-6) * weight


def main() -> None:
    for norm in (tree_norm, split_norm):
        report = samebits.check(norm, shapes=SHAPES, device="cpu")  # a GPU is taken where none is named
        print(f"{norm.__name__}: {'the same bits in every batch' if report.passed else 'NOT batch-invariant'}")
        for check in report.checks:
            print(f"    {check.name:20} {check.status:5} {check.summary}")
            for failure in check.failures[:1]:
                print(f"        {failure.result}, {failure.label}: {failure.what}")


if __name__ == "__main__":
    main()
