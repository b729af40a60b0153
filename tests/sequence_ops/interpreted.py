"""Run by test_attention.py under TRITON_INTERPRET=1: the kernels against the reference, FP16, at sizes that have every edge.

The interpreter multiplies matrices in FP32, so values are compared, not bits. It has no inline PTX: ``product`` is a plain
product here, which it is in every bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from samebits.sequence_ops.attention import contracts, reference, triton_backward
from samebits.sequence_ops.attention import triton as kernels
from samebits.sequence_ops.attention.checks import check


@triton.jit
def product(a, b):  # type: ignore[no-untyped-def]
    return (a * b).to(tl.float32)


kernels.product = triton_backward.product = product
_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope):  # type: ignore[no-untyped-def]
    """Triton 3.6 takes the bound of a loop out of an array of one element in a way that NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched

CASES = (
    # contract, causal, D, (heads, key heads), queries, keys, documents
    ("cudnn", False, 64, (1, 1), 70, 150, None),
    ("cudnn", True, 64, (2, 1), 20, 150, None),
    ("fa2", True, 128, (1, 1), 70, 70, None),
    ("fa2", False, 64, (1, 1), 1, 130, None),
    ("cudnn", True, 64, (1, 1), 20, 9, None),  # queries that see no key
    ("fa2", True, 64, (1, 1), 20, 9, None),
    ("cudnn", True, 64, (2, 1), 50, 50, (0, 3, 3, 40, 50)),  # an empty document among them
    ("fa2", False, 64, (1, 1), 90, 90, (0, 3, 3, 80, 90)),
)


NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")


def compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[list[str], float]:
    """The names of what differs in type, shape, infinities or by more than the interpreter explains; the largest difference."""
    differing, worst = [], 0.0
    for name, ours, theirs in zip(NAMES, results, expected, strict=True):
        infinite = theirs.isinf()
        gap = (ours.double() - theirs.double()).masked_fill(infinite, 0.0).abs().max().item()
        alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours.isinf(), infinite)
        if not (alike and gap <= (1e-5 if name == "lse" else 3e-3)):
            differing.append(name)
        worst = max(worst, gap)
    return differing, worst


def main() -> None:
    torch.manual_seed(0)
    worst = 0.0
    for number, case in enumerate(CASES):
        contract, causal, head_dim, (heads, kv_heads), queries, keys, bounds = case
        batch = 1 if bounds or heads > 1 else 2
        wide = torch.randn(batch, queries, heads + 1, head_dim).half()
        q = wide[:, :, 1:]  # a view whose heads do not start at its storage
        k, v = (torch.randn(batch, keys, kv_heads, head_dim).half() for _ in range(2))
        cu = torch.tensor(bounds) if bounds else None
        scale, recipe = head_dim**-0.5, contracts.recipe(contract)
        problem = check("attention", q, k, v, cu, None, scale, contract)
        expected = reference.forward(problem, recipe, q, k, v, cu, None, causal, scale)
        grad = torch.randn(q.shape).half()
        arguments = (q, k, v, *expected, grad, cu, None, causal, scale)
        expected += reference.backward(problem, *arguments)
        tile = kernels.Plan((64, 16)[number % 2], 4, 1)
        results = kernels.forward(problem, recipe, tile, q, k, v, cu, None, causal, scale)
        tiling = triton_backward.Tiling
        plan = triton_backward.Plan(tiling(32 - 16 * (number % 2), 64, 4, 1), tiling(tile.rows, 32, 4, 1))
        results += triton_backward.backward(problem, plan, *arguments, (True, True))
        differing, largest = compare(results, expected)
        assert not differing, (case, differing, largest)
        worst = max(worst, largest)
        for i, name in enumerate(NAMES):  # the comparison itself can fail
            faulty = [r if j != i else r.index_fill(0, torch.tensor(0), 7.0) for j, r in enumerate(results)]
            assert compare(faulty, expected)[0] == [name]
    print(f"{len(CASES)} cases, largest difference {worst:.2g}")


if __name__ == "__main__":
    sys.exit(main())
