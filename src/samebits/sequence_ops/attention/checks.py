"""What a call of ``attention`` is, and whether it is accepted. Shapes, dtypes, devices; values only of ``cu_seqlens``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.checks import DTYPES, FLOAT32_MAX
from samebits.sequence_ops.attention import contracts

MOST_HEADS = 65535
MOST_ROWS = 2**31 - 2**16
"""Positions of a sequence, and packed positions together, are counted in 32 bits."""
_ACCEPTED = tuple(DTYPES[name] for name in contracts.DTYPES)
_FORMS = {"q": "(B, S_q, H, D)", "k": "(B, S_k, H_kv, D)", "v": "(B, S_k, H_kv, D)"}


@dataclass(frozen=True)
class Problem:
    """The sizes that one call agreed on. Packed: one batch entry, cut into ``documents`` sequences."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    packed: bool
    documents: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def queries_each(self) -> int:
        """Queries of a sequence, on average: what a document has is not read here."""
        return self.queries // self.documents if self.packed else self.queries

    def programs(self, length: int, tile: int) -> int:
        """Tiles of all sequences, of ``length`` positions in a batch entry. Packed, an upper bound that waits for no bounds:
        the kernels give document d those from ``cu_seqlens[d] // tile + d`` on, which is always enough."""
        return length // tile + self.documents if self.packed else self.batch * -(-length // tile)


def check(
    title: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    contract: str,
) -> Problem:
    """TypeError for a type or dtype, ValueError for a shape, device, layout or value; says what is accepted."""
    contracts.recipe(contract)
    given = {"q": q, "k": k, "v": v}
    for name, tensor in given.items():
        if tensor.dtype not in _ACCEPTED:
            accepted = " or ".join(map(str, _ACCEPTED))
            raise TypeError(f"{title}: {name} has dtype {tensor.dtype}, expected {accepted}; cast it explicitly")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{title}: {name} has dtype {tensor.dtype}, but q has {q.dtype}; they must agree")
        _check_dense(title, name, tensor, _FORMS[name])
        if tensor.device != q.device:
            raise ValueError(f"{title}: {name} is on {tensor.device}, but q is on {q.device}")
    batch, queries, heads, head_dim = q.shape
    if head_dim not in contracts.HEAD_DIMS:
        accepted = " or ".join(map(str, contracts.HEAD_DIMS))
        raise ValueError(f"{title}: q has head dimension D = {head_dim}, expected {accepted}")
    keys, kv_heads = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"{title}: k has shape {tuple(k.shape)}, expected ({batch}, S_k, H_kv, {head_dim})")
    if v.shape != k.shape:
        raise ValueError(f"{title}: v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}; they must agree")
    if not 1 <= heads <= MOST_HEADS or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{title}: q has {heads} heads and k {kv_heads}; H must be a multiple of H_kv, 1 .. {MOST_HEADS}"
        )
    for name, size in (("S_q", batch * queries), ("S_k", batch * keys)):
        if size > MOST_ROWS:
            raise ValueError(f"{title}: B * {name} = {size} exceeds {MOST_ROWS}")
    if not math.isfinite(scale) or not 2.0**-120 <= scale <= FLOAT32_MAX / 2:
        raise ValueError(f"{title}: scale = {scale} must be positive and, times log2(e), a normal FP32 number")
    documents = _check_documents(title, q, batch, queries, keys, cu_seqlens, cu_seqlens_k)
    return Problem(batch, queries, keys, heads, kv_heads, head_dim, cu_seqlens is not None, documents)


def _check_dense(title: str, name: str, tensor: Tensor, form: str) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"{title}: {name} has layout {tensor.layout}, expected a strided (dense) tensor")
    if tensor.dim() != 4:
        raise ValueError(f"{title}: {name} has shape {tuple(tensor.shape)}, expected {form}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{title}: {name} has stride {tensor.stride(-1)} in its last axis, expected 1; pass {name}.contiguous()"
        )


def _check_documents(
    title: str, q: Tensor, batch: int, queries: int, keys: int, cu_q: Tensor | None, cu_k: Tensor | None
) -> int:
    if cu_q is None:
        if cu_k is not None:
            raise ValueError(f"{title}: cu_seqlens_k without cu_seqlens; packed queries need their own bounds")
        return batch
    if batch != 1:
        raise ValueError(f"{title}: q has batch {batch}, but packed documents are one sequence: expected (1, T, H, D)")
    if cu_k is None and keys != queries:
        raise ValueError(f"{title}: {keys} keys and {queries} queries are packed differently; pass cu_seqlens_k")
    for name, bounds in (("cu_seqlens", cu_q), ("cu_seqlens_k", cu_k)):
        if bounds is None:
            continue
        if bounds.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{title}: {name} has dtype {bounds.dtype}, expected torch.int32 or torch.int64")
        if bounds.dim() != 1 or bounds.shape[0] < 2:
            raise ValueError(f"{title}: {name} has shape {tuple(bounds.shape)}, expected (documents + 1,)")
        if bounds.device != q.device:
            raise ValueError(f"{title}: {name} is on {bounds.device}, but q is on {q.device}")
    documents = cu_q.shape[0] - 1
    if cu_k is not None and cu_k.shape[0] - 1 != documents:
        raise ValueError(f"{title}: cu_seqlens has {documents} documents, cu_seqlens_k {cu_k.shape[0] - 1}")
    return documents


def check_bounds(title: str, name: str, bounds: Tensor, total: int) -> None:
    """Ascending from 0 to ``total``. IndexError on a CPU; on a GPU an assertion there, so that nothing waits for it."""
    wrong = (bounds[0] != 0) | (bounds[-1] != total) | (bounds.diff() < 0).any()
    message = f"{title}: {name} must ascend from 0 to the {total} packed positions"
    if bounds.is_cuda:
        torch._assert_async(~wrong, message)
    elif bool(wrong):
        raise IndexError(f"{message}, got {bounds.tolist()[:8]}{' ...' if bounds.shape[0] > 8 else ''}")


def check_gradient(title: str, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> None:
    """What a backward takes besides the forward's inputs."""
    batch, queries, heads, _ = q.shape
    for name, tensor, dtype, shape in (
        ("grad_out", grad_out, q.dtype, tuple(q.shape)),
        ("out", out, q.dtype, tuple(q.shape)),
        ("lse", lse, torch.float32, (batch, heads, queries)),
    ):
        if tensor.dtype != dtype:
            raise TypeError(f"{title}: {name} has dtype {tensor.dtype}, expected {dtype}; cast it explicitly")
        if tensor.layout != torch.strided:
            raise ValueError(f"{title}: {name} has layout {tensor.layout}, expected a strided (dense) tensor")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{title}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.device != q.device:
            raise ValueError(f"{title}: {name} is on {tensor.device}, but q is on {q.device}")
