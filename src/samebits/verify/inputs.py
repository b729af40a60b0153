"""Inputs that are the same bits on every machine and in every version of every library.

The source is the raw 64-bit output of Philox4x64-10, a published integer algorithm; no floating-point generator is
involved. Integers become dyadic numbers (a short integer times a power of two), so the only rounding is one exact
rule: nearest-even to the dtype. A row depends on (seed, operator, input, row id) and on nothing else, so any batch
can be recomposed from row ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float64]

PATTERNS = (
    "normal",
    "wide",
    "cancelling",
    "subnormal",
    "tiny",
    "zero",
    "minus_zero",
    "inf",
    "nan",
    "huge",
    "small_mean",
)
"""Value patterns. All but ``normal`` apply to the even row ids; odd rows stay normal, so that special rows have neighbours."""

FINITE_PATTERNS = ("normal", "zero", "small_mean", "minus_zero")
"""Patterns that an FP64 golden can judge: no overflow, no NaN, no result that is only rounding error."""

PARAMETER_ROW = 0
_SUBNORMAL_SCALE = {torch.float32: -139, torch.bfloat16: -130, torch.float16: -20}
TINY = (-64,)
"""Exponents of ``tiny``, for columns 0, 1, ... in turn. As they are, the products of two inputs are subnormal in FP32."""
_TINY_SPREAD = 8
_HUGE_SCALE = {torch.float32: 127, torch.bfloat16: 127, torch.float16: 15}


def words(seed: int, stream: str, row: int, count: int) -> Words:
    """``count`` raw Philox words (uint64) of one row of one stream."""
    key = hashlib.sha256(f"{seed}/{stream}".encode()).digest()[:16]
    generator = np.random.Philox(key=int.from_bytes(key, "little"), counter=row << 128)
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def _bell(word: Words) -> npt.NDArray[np.int64]:
    """Roughly normal, variance 1.02: 7 * (sum of four 16-bit integers - their mean) / 2^18, 21 bits. As int64 over 2^18."""
    total = np.zeros(word.shape, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((word >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return 7 * (total - 131070)


def draw(sample: str, word: Words) -> Values:
    """FP64 values, each exactly representable in FP32, of one of the samples that a TensorArg may name."""
    if sample == "normal":
        return np.ldexp(_bell(word), -18)
    if sample == "weight":
        return np.ldexp((1 << 19) + _bell(word), -19)
    if sample == "positive":
        return np.ldexp(((word >> np.uint64(42)) + np.uint64(1 << 18)).astype(np.int64), -22)
    if sample == "unit":
        return np.ldexp((word >> np.uint64(42)).astype(np.int64), -22)
    if sample == "small":
        return np.ldexp(_bell(word), -24)
    if sample == "ones":
        return np.ones(word.shape)
    raise ValueError(
        f"no sample named {sample!r}; choose one of 'normal', 'weight', 'positive', 'unit', 'small', 'ones'"
    )


def shape_values(pattern: str, values: Values, word: Words, dtype: torch.dtype, tiny: tuple[int, ...] = TINY) -> Values:
    """One row of values turned into the pattern; ``word`` decides where, ``tiny`` how small the values of ``tiny`` are."""
    at = int(word[0] % np.uint64(max(values.size, 1))) if values.size else 0
    if pattern == "normal":
        return values
    if pattern == "wide":
        span = np.uint64(10 if dtype == torch.float16 else 41)
        exponent = (word % span).astype(np.int64) - int(span) // 2
        return np.ldexp(values, exponent)
    if pattern == "cancelling":
        # Neighbours cancel except for one small term each: the order of a sum decides what is left.
        turned = values.copy()
        turned[1::2] = -turned[: turned.size // 2 * 2 : 2]
        large = np.ldexp(turned, 8 if dtype == torch.float16 else 12)
        large[::5] = values[::5]
        return large
    if pattern == "subnormal":
        return np.ldexp(values, _SUBNORMAL_SCALE[dtype])
    if pattern == "tiny":
        # 2^-64 .. 2^-71: products of two lie below 2^-126, and the least of them lose bits even from BF16 inputs.
        exponent = np.resize(np.asarray(tiny, dtype=np.int64), values.shape)
        spread = ((word >> np.uint64(8)) % np.uint64(_TINY_SPREAD)).astype(np.int64)
        return np.ldexp(values, np.where(exponent, exponent - spread, 0))
    if pattern == "zero":
        return np.zeros_like(values)
    if pattern == "minus_zero":
        return np.where(word & np.uint64(1), values, -0.0)
    if pattern in ("inf", "nan"):
        turned = values.copy()
        turned[at] = np.nan if pattern == "nan" else (np.inf if word[0] & np.uint64(1 << 20) else -np.inf)
        return turned
    if pattern == "huge":
        sign = np.where(word & np.uint64(1), 1.0, -1.0)
        return sign * np.ldexp(
            1.0 + ((word >> np.uint64(8)) % np.uint64(100)).astype(np.int64) / 128, _HUGE_SCALE[dtype]
        )
    if pattern == "small_mean":
        return np.ldexp(5 * values, -8)
    raise ValueError(f"no pattern named {pattern!r}; choose one of {', '.join(map(repr, PATTERNS))}")


def row_tensor(
    stream: str,
    rows: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int = 0,
    sample: str = "normal",
    pattern: str = "normal",
    tiny: tuple[int, ...] = TINY,
) -> Tensor:
    """(len(rows), *shape) on the CPU. ``stream`` names operator and input, e.g. ``"h_aggregate/pre"``."""
    count = int(np.prod(shape, dtype=np.int64))
    values = np.empty((len(rows), count))
    for index, row in enumerate(rows):
        word = words(seed, stream, row, max(count, 1))[:count]
        drawn = draw(sample, word)
        values[index] = (
            shape_values(pattern if row % 2 == 0 else "normal", drawn, word, dtype, tiny) if count else drawn
        )
    # FP64 -> FP32 is exact except where FP32 overflows or goes subnormal; then one nearest-even rounding to the dtype.
    return torch.from_numpy(values.reshape(len(rows), *shape)).to(dtype)


def index_tensor(stream: str, rows: Sequence[int], below: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(len(rows),) integers from 0 up to ``below``, on the CPU."""
    chosen = [int(words(seed, stream, row, 1)[0] % np.uint64(below)) for row in rows]
    return torch.tensor(chosen, dtype=dtype)


def parameter_tensor(
    stream: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, sample: str = "normal"
) -> Tensor:
    """A tensor that all rows share, on the CPU."""
    return row_tensor(stream, [PARAMETER_ROW], shape, dtype, seed, sample)[0]
