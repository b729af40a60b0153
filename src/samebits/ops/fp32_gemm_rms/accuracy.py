"""How far each way to compute the projection and its gradients is from FP64, as a Markdown table.

    python -m samebits.ops.fp32_gemm_rms.accuracy [--device cuda] [--rows 1024] [--sizes 16384,28672]

``random``: everything normal. ``cancelling``: the second half of every row takes back what the first half adds, but for
each 64th term, and so does the second half of the rows for the gradient of the weight; sums over N do not cancel. Errors
are the largest one and the root mean square, over the root mean square of the FP64 result. What needs a GPU is left out on
a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from samebits.registry import operator
from samebits.verify import inputs

OUTPUTS = 24
RESULTS = ("proj", "grad_x", "grad_weight")
Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""x (T, K) BF16, weight (N, K), grad_proj (T, N) to proj, the projection leg of grad_x, and grad_weight."""


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    usual = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = usual


def _library(allowed: bool) -> Way:
    def run(x: Tensor, weight: Tensor, grad_proj: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        with _tf32(allowed):
            return wide @ weight.T, grad_proj @ weight, grad_proj.T @ wide

    return run


def _ours(contract: str) -> Way:
    def run(x: Tensor, weight: Tensor, grad_proj: Tensor) -> tuple[Tensor, ...]:
        op = operator("fp32_gemm_rms")
        proj, r, q = op.forward(x, weight, contract=contract)
        none = torch.zeros_like(r)  # the RMS leg is then zero
        grad_x, grad_weight = op.backward(grad_proj, none, x, weight, r, q, None, contract=contract)
        assert grad_x is not None and grad_weight is not None
        return proj, grad_x, grad_weight

    return run


def ways(device: str) -> dict[str, Way]:
    on_gpu = {"cuBLAS TF32": _library(True)} if device == "cuda" else {}
    fast = {"fast": _ours("fast")} if device == "cuda" else {}
    return {**on_gpu, "library FP32": _library(False), "ascending": _ours("ascending"), **fast}


def data(kind: str, rows: int, size: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, grad_proj) of one kind."""
    x = inputs.row_tensor("accuracy/x", range(rows), (size,), torch.bfloat16)
    weight = inputs.row_tensor("accuracy/weight", range(OUTPUTS), (size,), torch.float32, sample="small")
    grad_proj = inputs.row_tensor("accuracy/grad_proj", range(rows), (OUTPUTS,), torch.float32)
    if kind == "cancelling":
        for tensor, half, sign in (
            (x.T, size // 2, -1),
            (weight.T, size // 2, 1),
            (x, rows // 2, -1),
            (grad_proj, rows // 2, 1),
        ):
            tensor[half : 2 * half] = sign * tensor[:half]
        x[:, size // 2 :: 64] = 0
        x[rows // 2 :: 64] = 0
    return x.to(device), weight.to(device), grad_proj.to(device)


def errors(kind: str, rows: int, size: int, device: str) -> Iterator[tuple[str, str, float, float]]:
    """(way, result, largest error, root mean square error), both over the root mean square of the FP64 result."""
    x, weight, grad_proj = data(kind, rows, size, device)
    wide, w, g = x.double(), weight.double(), grad_proj.double()
    exact = (wide @ w.T, g @ w, g.T @ wide)
    for name, way in ways(device).items():
        for result, value, golden in zip(RESULTS, way(x, weight, grad_proj), exact, strict=True):
            error, scale = (value.double() - golden).abs(), golden.square().mean().sqrt()
            yield name, result, float(error.max() / scale), float(error.square().mean().sqrt() / scale)


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors against FP64 of fp32_gemm_rms and of the library.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--sizes", default="16384,28672")
    given = parser.parse_args()
    print(
        f"T = {given.rows}, N = {OUTPUTS}; largest / root mean square error over the root mean square of the FP64 result\n"
    )
    print("| K | data | | " + " | ".join(RESULTS) + " |")
    print("|---|---|---|" + "---|" * len(RESULTS))
    for size in map(int, given.sizes.split(",")):
        for kind in ("random", "cancelling"):
            lines: dict[str, list[str]] = {}
            for way, _, largest, mean in errors(kind, given.rows, size, given.device):
                lines.setdefault(way, []).append(f"{largest:.1e} / {mean:.1e}")
            for way, cells in lines.items():
                print(f"| {size} | {kind} | {way} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
