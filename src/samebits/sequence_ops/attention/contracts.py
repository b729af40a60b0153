"""The contracts of ``attention``: what is promised, and the numbers that every backend repeats. Imports no torch."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from samebits.contract import Contract, Reduction

NAME = "attention"
HEAD_DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")
APPROXIMATE = ("ex2.approx.ftz.f32", "div.full.f32")
GROUP = 16
"""Products that a step of the tensor-core chain takes: query blocks of the backward begin at multiples of it."""

_CHAINS = (
    Reduction("s", "D", "tensor-core chain over ascending d"),
    Reduction("grad_q", "keys", "tensor-core chain over the keys of the sequence, ascending"),
    Reduction("grad_k", "queries", "tensor-core chain over query heads of the group, then queries, both ascending"),
    Reduction("grad_v", "queries", "tensor-core chain over query heads of the group, then queries, both ascending"),
    Reduction("delta", "D", "products exact in FP32, halving tree D/2, ..., 2, 1"),
)
_ROUNDING = (
    "p: FP32 to the dtype of v, once, before it meets v; in the backward before it meets grad_out",
    "ds: FP32 to the dtype of q, once, before its products",
    "out: FP32 to the dtype of q, once",
    *(f"{name}: FP32 to the dtype of the input, once" for name in ("grad_q", "grad_k", "grad_v")),
)


@dataclass(frozen=True)
class Recipe:
    """A contract, and what of it the kernels need as numbers."""

    contract: Contract
    kv_blocks: tuple[tuple[int, int], ...]
    """head_dim, and the keys that are taken together there, counted from the first key of the sequence."""
    last_block_first: bool

    def kv_block(self, head_dim: int) -> int:
        return dict(self.kv_blocks)[head_dim]


CUDNN = Recipe(
    Contract(
        name="cudnn",
        summary="the arithmetic of cuDNN's sm_90 forward, torch's default on an H200: key blocks of 128, ascending",
        exactness="kchain",
        reductions=(
            *_CHAINS,
            Reduction(
                "l", "keys", "4 partials by column mod 8 // 2; l = fma(l, a, left fold of the block); (0+1)+(2+3)"
            ),
            Reduction("out", "keys", "per block of 128, ascending: o = o * a, then the chain of p v continues o"),
        ),
        rounding=_ROUNDING,
        fma="explicit",
        approximate=APPROXIMATE,
        source="reproduced from torch's CUDNN_ATTENTION on an H200; documents and one query extend it",
    ),
    kv_blocks=((64, 128), (128, 128)),
    last_block_first=False,
)

FA2 = Recipe(
    Contract(
        name="fa2",
        summary="the arithmetic of FlashAttention-2 as torch ships it: key blocks of 64 (128 at head_dim 64), the last one first",
        exactness="kchain",
        reductions=(
            *_CHAINS,
            Reduction(
                "l", "keys", "4 partials by column mod 8 // 2; l = fma(l, a, p0), then + p1, + p2 ...; (0+2)+(1+3)"
            ),
            Reduction(
                "out",
                "keys",
                "per block of 64 (128 at head_dim 64), descending: o = o * a, then the chain of p v continues o",
            ),
        ),
        rounding=_ROUNDING,
        fma="explicit",
        approximate=APPROXIMATE,
        source="reproduced from torch's FLASH_ATTENTION on an H200 where it does not split the keys; documents extend it",
    ),
    kv_blocks=((64, 128), (128, 64)),
    last_block_first=True,
)

RECIPES = {recipe.contract.name: recipe for recipe in (CUDNN, FA2)}


def recipe(name: str) -> Recipe:
    """ValueError: there is no contract of this name."""
    if name not in RECIPES:
        raise ValueError(f"{NAME} has no contract {name!r}; choose one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[name]


def fp32(value: float) -> float:
    """``value`` rounded once to FP32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def exponent_scale(scale: float) -> float:
    """c: what turns scores into exponents of two, log2(e) * scale in FP64, rounded once to FP32."""
    return fp32(1.4426950408889634 * scale)


LOG2_E = fp32(math.log2(math.e))
LN_2 = fp32(math.log(2.0))
