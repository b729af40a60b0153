"""Small calls that reach every kernel of ``attention`` under every plan: what the memory checkers watch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from samebits import dispatch
from samebits.checks import DTYPES
from samebits.sequence_ops.attention import api
from samebits.sequence_ops.attention.spec import SPEC
from samebits.sequence_ops.attention.subject import Inputs, Kind, Ours, draw

LENGTHS = ((1, 200, 130), (2, 70, 70), (1, 1, 150), (1, 20, 9))
"""Batch, queries, keys: tiles with tails, several of them, one query, queries that see no key."""
DOCUMENTS = ((5, 3), (0, 2), (70, 140), (4, 0))
VARIANTS = (
    ("cudnn", False, 128, "bfloat16"),
    ("fa2", True, 128, "float16"),
    ("cudnn", True, 64, "bfloat16"),
    ("fa2", False, 64, "bfloat16"),
)
"""Contract, causal, head_dim, dtype. Kernels are specialised by all of them, and compiling each takes longer than checking it; no
address depends on two of them together but on the head_dim and the mask, or the contract's blocks."""


def exercise(
    device: torch.device,
    backends: Sequence[str] | None = None,
    variants: Sequence[tuple[str, bool, int, str]] = VARIANTS,
) -> int:
    """Forward and backward of each variant at all lengths under every plan, packed and strided under the first; the number of
    calls. Nothing is compared.

    Inputs are drawn on the CPU, so that under a checker nearly all kernels on the device are ours.
    """
    chosen = backends or tuple(str(b.name) for b in SPEC.backends if b.name != "reference")
    count = 0
    for contract, causal, head_dim, dtype in variants:
        kind = Kind(causal, head_dim, 4, 2)
        for (given, every), backend in itertools.product(_inputs(kind, DTYPES[dtype], device), chosen):
            if Ours(contract, backend).takes(given) is None:
                count += _run(given, contract, backend, every)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count


def _inputs(kind: Kind, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Inputs, bool]]:
    """And whether every plan runs on them."""
    for lengths in LENGTHS:
        yield draw(kind, lengths, dtype, 0, device), True
    ends = torch.tensor([(0, 0), *DOCUMENTS]).cumsum(0)
    given = draw(kind, (1, int(ends[-1, 0]), int(ends[-1, 1])), dtype, 0, device)
    packing = {name: ends[:, i].contiguous().to(device) for i, name in enumerate(("cu_seqlens", "cu_seqlens_k"))}
    yield replace(given, packing=packing), False
    given = draw(kind, (2, 70, 70), dtype, 0, device)
    yield replace(given, q=_in_a_wider(given.q), k=_in_a_wider(given.k), v=_in_a_wider(given.v)), False


def _in_a_wider(tensor: Tensor) -> Tensor:
    """The last heads of a tensor that has more of them, and ends with the last element that may be read."""
    more = torch.zeros(*tensor.shape[:2], 1, tensor.shape[3], dtype=tensor.dtype, device=tensor.device)
    return torch.cat([more, tensor], 2)[:, :, 1:]


def _run(given: Inputs, contract: str, backend: str, every: bool) -> int:
    ours = Ours(contract, backend)
    forward, backward = (ours.decision(given, way)[1] if every else 1 for way in (False, True))
    options = {"contract": contract, "backend": backend, **given.options}
    count = 0
    with torch.no_grad():
        out, lse = api.attention(given.q, given.k, given.v, **options)
        for plan in range(1, forward):
            with dispatch.force_plan(plan):
                api.attention(given.q, given.k, given.v, **options)
            count += 1
        for plan in range(backward):
            with dispatch.force_plan(plan):
                api.attention_backward(given.grad_out, given.q, given.k, given.v, out, lse, **options)
            count += 1
    return count + 1
