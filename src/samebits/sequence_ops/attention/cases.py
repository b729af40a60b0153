"""Cases of ``attention`` whose digests are committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.checks import DTYPES
from samebits.sequence_ops.attention import api
from samebits.sequence_ops.attention.subject import Inputs, Kind, draw

PORTABLE = ()
"""Everything goes through a tensor core."""


@dataclass(frozen=True)
class Case:
    """``lengths``: batch, queries, keys. ``documents``: (queries, keys) of each, in place of a batch."""

    name: str
    kind: Kind
    lengths: tuple[int, int, int] = (1, 17, 70)
    dtype: str = "bfloat16"
    documents: tuple[tuple[int, int], ...] = ()
    pattern: str = "normal"
    seed: int = 0


CASES = (
    Case("full_d64", Kind(False, 64, 4, 2), (2, 33, 150)),
    Case("causal_d64", Kind(True, 64, 3, 3), (1, 70, 70), seed=1),
    Case("full_d128", Kind(False, 128, 2, 2), (1, 65, 129)),
    Case("causal_d128_float16", Kind(True, 128, 4, 1), (1, 40, 200), "float16"),
    Case("one_query", Kind(False, 128, 4, 1), (2, 1, 300)),
    Case("blind_queries", Kind(True, 64, 2, 1), (1, 20, 9)),
    Case("documents", Kind(True, 64, 2, 1), documents=((5, 3), (0, 2), (40, 140), (4, 0))),
    *(Case(name, Kind(False, 64, 2, 2), pattern=name) for name in ("wide", "cancelling", "tiny", "minus_zero")),
)


def inputs_of(case: Case, device: torch.device) -> Inputs:
    if not case.documents:
        return draw(case.kind, case.lengths, DTYPES[case.dtype], case.seed, device, case.pattern)
    ends = torch.tensor([(0, 0), *case.documents]).cumsum(0)
    lengths = (1, int(ends[-1, 0]), int(ends[-1, 1]))
    packing = {name: ends[:, i].contiguous().to(device) for i, name in enumerate(("cu_seqlens", "cu_seqlens_k"))}
    return replace(draw(case.kind, lengths, DTYPES[case.dtype], case.seed, device, case.pattern), packing=packing)


def results(contract: str, device: torch.device, backend: str | None) -> Iterator[tuple[str, str, str, Tensor]]:
    """(direction, case, result, its value)."""
    for case in CASES:
        given = inputs_of(case, device)
        options = {"contract": contract, "backend": backend, **given.options}
        with torch.no_grad():
            out, lse = api.attention(given.q, given.k, given.v, **options)
            found = api.attention_backward(given.grad_out, given.q, given.k, given.v, out, lse, **options)
        yield "forward", case.name, "out", out
        yield "forward", case.name, "lse", lse
        for name, grad in zip("qkv", found, strict=True):
            assert grad is not None
            yield "backward", case.name, f"grad_{name}", grad
