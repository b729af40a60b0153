"""What ``attention`` is compared with: torch's own backends of scaled_dot_product_attention, each by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebits.sequence_ops.attention.targets import CUDNN, FLASH, FLASH_DETERMINISTIC

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (B, S_q, H, D), k and v (B, S_k, H_kv, D) to (B, S_q, H, D)."""


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Heads and positions as in ``attention``; a causal mask is aligned at the top left."""
    first, second, third = (t.transpose(1, 2) for t in (q, k, v))
    shared = q.shape[2] != k.shape[2]
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(
            first, second, third, is_causal=causal, enable_gqa=shared
        )
    return out.transpose(1, 2)


PEERS: dict[str, Attention] = {
    CUDNN: functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    FLASH: functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    FLASH_DETERMINISTIC: functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "math": functools.partial(sdpa, SDPBackend.MATH),
}
"""Not causal. ``deterministic`` is for whoever runs a backward: under ``torch.use_deterministic_algorithms``."""
DETERMINISTIC = FLASH_DETERMINISTIC
TIMED = (CUDNN, FLASH, "efficient")
"""``math`` holds all scores at once."""


def unavailable(name: str, device: str) -> str | None:
    """Why a peer cannot run on this type of device, or None. On a CPU torch has another attention of FlashAttention's name."""
    return "it runs on an NVIDIA GPU alone" if device != "cuda" and name in (CUDNN, "efficient") else None
