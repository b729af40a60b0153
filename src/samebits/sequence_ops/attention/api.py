"""``samebits.attention`` and its explicit backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.autograd import refuse_second_derivative, refuse_tangents
from samebits.sequence_ops.attention import contracts, op


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    contract: str = "cudnn",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, whose row for a query depends on that query and its sequence's keys alone.

    Args:
        q: (B, S_q, H, D) BF16 or FP16, D = 64 or 128. Any strides with a dense last axis are read in place, as for k and v.
        k, v: (B, S_k, H_kv, D), dtype of q; H is a multiple of H_kv, and query head h reads key head h // (H / H_kv).
        causal: the last query sees all keys, the one before it all but the last, and so on (aligned bottom-right, as in
            FlashAttention-2; torch's ``is_causal`` is the same where S_q = S_k). A row that sees no key is 0.
        scale: what scores are multiplied by, positive; D^-0.5 by default.
        cu_seqlens: (N + 1,) int32 or int64, ascending from 0 to S_q: B is 1 and holds N documents, each its own sequence.
        cu_seqlens_k: as much for the keys, where they are packed otherwise.
        contract: ``"cudnn"`` or ``"fa2"``, see the README.
        backend: ``"cuda"`` (Hopper), ``"triton"`` or ``"reference"``; by default the fastest that can. All have
            the same bits.

    Returns:
        out (B, S_q, H, D) in the dtype of q, and lse (B, H, S_q) FP32: ln sum exp(scale * s), -inf where no key is seen.
        Gradients flow through out alone.

    Raises:
        TypeError: a type or dtype. ValueError: a shape, stride, device, scale, contract or backend.
        IndexError: a ``cu_seqlens`` that does not ascend from 0 to the number of positions (on a GPU an assertion there).
    """
    given = {"q": q, "k": k, "v": v}
    _check_types(contracts.NAME, given, cu_seqlens, cu_seqlens_k, causal, scale)
    refuse_tangents(contracts.NAME, (q, k, v))
    factor = _scale(q, scale)
    return op.forward(q, k, v, cu_seqlens, cu_seqlens_k, causal, factor, contract, backend)


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    contract: str = "cudnn",
    backend: str | None = None,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_q, grad_k, grad_v) of :func:`attention`, each in the dtype and shape of its input; None where not ``wanted``.

    ``grad_out`` and ``out`` are (B, S_q, H, D) in the dtype of q, ``lse`` (B, H, S_q) FP32; they are copied where they are not
    contiguous. Everything else, and what is raised, as there.
    """
    title = f"{contracts.NAME}_backward"
    given = {"grad_out": grad_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    _check_types(title, given, cu_seqlens, cu_seqlens_k, causal, scale)
    tensors = tuple(given.values())
    refuse_tangents(title, tensors)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        refuse_second_derivative(title)
    mask = list(wanted)
    results = op.backward(*tensors, cu_seqlens, cu_seqlens_k, causal, _scale(q, scale), contract, backend, mask)
    grad_q, grad_k, grad_v = (r if want else None for r, want in zip(results, mask, strict=True))
    return grad_q, grad_k, grad_v


def _check_types(
    title: str,
    given: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float | None,
) -> None:
    """What torch's own schema would refuse, in words of its own."""
    bounds = {name: t for name, t in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)) if t is not None}
    for name, tensor in (given | bounds).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{title}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
    if not isinstance(causal, bool):
        raise TypeError(f"{title}: causal must be a bool, not {causal!r}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"{title}: scale must be a number, not {scale!r}")


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is not None:
        return float(scale)
    return float(q.shape[-1] ** -0.5) if q.dim() and q.shape[-1] else 1.0  # the shape is refused later, in full
