"""A 128-bit digest of a tensor's bytes, computed on the tensor's own device, with no wait for it.

All of it is integer arithmetic that no order of summation can change, so a CPU and a GPU give one digest for the same bytes:

1. the bytes, in index order and little-endian, are cut into chunks of 1024; a chunk, as signed 8-bit numbers, times a fixed
   key matrix gives a vector of 16 32-bit sums. This is an 8-bit matrix product: it reads the bytes once and writes 1/16 of that;
2. while more than 4096 vectors are left, their bytes go through step 1 again, with keys of their own for each level;
3. each remaining 32-bit sum times its own 64-bit key, added modulo 2**64; twice, with other keys, is 128 bits. The number of
   bytes times a key is added at the end, so that zeros at the end count.

How unlikely a collision is stands in the README. The keys are public: this finds accidents, it is no signature.
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch
from torch import Tensor

NAME = "samebits-128-1"
"""Name of the definition above, stated in every trace: digests of different definitions are not comparable."""
CHUNK = 1024
COLUMNS = 16
FAN_IN = CHUNK // (4 * COLUMNS)
"""Vectors that make one chunk of the next level."""
LAST = 4096
"""Most vectors that the last step takes."""
LANES = 2
_ALIGNMENT = 16
_BLOCK = 8192
"""Chunks converted to FP32 at a time; bounds the memory of that path to 32 MiB."""
_SMALLEST_INTEGER_PRODUCT = 17
"""``torch._int_mm`` takes no fewer rows than this on a GPU."""


def key_bytes(name: str, count: int) -> bytes:
    """``count`` bytes that only depend on ``name``: SHAKE-256, so that no library's random generator is part of the format."""
    return hashlib.shake_256(f"{NAME}/{name}".encode()).digest(count)


LENGTH_KEYS = tuple(int.from_bytes(key_bytes(f"length{lane}", 8), "little") | 1 for lane in range(LANES))


def obstacle(tensor: Tensor) -> str | None:
    """Why this tensor has no bytes to digest, or None."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a wrapper of torch.func, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return "no data"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "made while a CUDA graph was captured: it has no value yet"
    return None


def lanes(tensor: Tensor, lead: int = 0) -> tuple[Tensor, Tensor | None, int]:
    """Digest of the whole tensor, shape (1, 2), and of every row, (rows, 2) or None; int64 on the tensor's device.

    ``lead`` axes in front count the rows; with 0 there are none. Also the bytes of a row. :func:`text` makes the digest of them.
    Where a row is a multiple of 1024 bytes, both come from one pass over the bytes.
    """
    with torch.no_grad(), _plain(tensor.device):
        data = _bytes(tensor)
        size = data.numel()
        if lead == 0:
            return _finish(_vectors(data.view(1, size), 1)), None, 0
        rows = math.prod(tensor.shape[:lead])
        width = size // rows if rows else 0
        vectors = _vectors(data.view(rows, width), 1)
        if width % CHUNK == 0 and width:
            whole = vectors.view(1, -1, COLUMNS)
        else:
            whole = _vectors(data.view(1, size), 1)
        return _finish(whole), _finish(vectors), width


def text(low: int, high: int, size: int) -> str:
    """The digest as 32 hex digits, from the two sums of ``size`` bytes."""
    words = ((lane + size * key) % 2**64 for lane, key in zip((low, high), LENGTH_KEYS, strict=True))
    return "".join(f"{word:016x}" for word in words)


def digest(tensor: Tensor) -> str:
    """Digest of one tensor at once, 32 hex digits; waits for the device. Raises ValueError where there is nothing to digest."""
    why = obstacle(tensor)
    if why is not None:
        raise ValueError(f"cannot digest: {why}")
    low, high = lanes(tensor)[0].view(LANES).tolist()
    return text(low, high, tensor.numel() * tensor.element_size())


# --- steps ------------------------------------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes in index order as int8, (bytes,). A view where the tensor is dense and aligned, a copy otherwise."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.int8, device=tensor.device)
    if dense.data_ptr() % _ALIGNMENT:
        dense = dense.clone()
    return dense.view(torch.int8)


def _vectors(data: Tensor, level: int) -> Tensor:
    """Step 1: int8 (m, bytes) to int32 (m, chunks, 16). A last chunk that is not full counts as filled up with zeros."""
    many, width = data.shape
    full, tail = divmod(width, CHUNK)
    if many == 0 or width == 0:
        return torch.zeros(many, 0, COLUMNS, dtype=torch.int32, device=data.device)
    if tail == 0:
        return _product(data.reshape(-1, CHUNK), level).view(many, full, COLUMNS)
    if many == 1 and full:  # the many full chunks are read in place, only the tail is copied
        parts = (data[:, : full * CHUNK], data[:, full * CHUNK :])
        return torch.cat([_vectors(part, level) for part in parts], dim=1)
    if full:
        return _vectors(torch.nn.functional.pad(data, (0, CHUNK - tail)), level)
    if width % _ALIGNMENT:
        data = torch.nn.functional.pad(data, (0, -width % _ALIGNMENT))
    return _product(data, level).view(many, 1, COLUMNS)


def _finish(vectors: Tensor) -> Tensor:
    """Steps 2 and 3: int32 (m, chunks, 16) to int64 (m, 2)."""
    level = 2
    while vectors.shape[1] > LAST:
        many, count, _ = vectors.shape
        vectors = torch.nn.functional.pad(vectors, (0, 0, 0, -count % FAN_IN))
        vectors = _vectors(vectors.reshape(many, -1).view(torch.int8), level)
        level += 1
    keys = _last_keys(vectors.device)[: vectors.shape[1]]
    return (vectors.unsqueeze(-1) * keys).sum((1, 2))


def _product(data: Tensor, level: int) -> Tensor:
    """int8 (n, k) times the first k rows of the keys, k at most 1024: int32 (n, 16), exact."""
    keys = _chunk_keys(level, data.device)
    width = data.shape[1]
    if data.shape[0] >= _SMALLEST_INTEGER_PRODUCT and integer_product_is_exact(data.device):
        return torch._int_mm(data, keys[:, :width].t())
    return _float_product(data, keys[:, :width])


def _float_product(data: Tensor, keys: Tensor) -> Tensor:
    """The same through an FP32 product: every partial sum is an integer of at most 1024 * 128 * 128 = 2**24, so it is exact,
    in any order, and with inputs cut to TF32 or BF16 as well, since 8-bit numbers fit in both."""
    weight = keys.to(torch.float32).t()
    blocks = [block.to(torch.float32) @ weight for block in data.split(_BLOCK)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(torch.int32)


@functools.cache
def integer_product_is_exact(device: torch.device) -> bool:
    """Whether this device has an 8-bit matrix product that does not saturate. Some CPUs' does: they add pairs in 16 bits.

    Tried once, on the values that would show it.
    """
    values = torch.tensor([-128, 127, -128, -1, 127, 127, 0, 1], dtype=torch.int8)
    data = torch.stack([values.roll(shift).repeat(CHUNK // 8) for shift in range(8)] * 4).to(device)
    data[0], data[1] = -128, 127
    keys = _chunk_keys(1, device).clone()
    keys[0], keys[1] = -128, 127
    try:
        return bool(torch.equal(torch._int_mm(data, keys.t()), _float_product(data, keys)))
    except (RuntimeError, NotImplementedError):  # no such product on this device
        return False


class _Plain:
    """Nothing of the caller's modes may touch the arithmetic: autocast would round the sums of the FP32 product."""

    def __init__(self, device: torch.device) -> None:
        self._autocast = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else None
        # Buffers and keys outlive this call; made under inference mode they could not be written later.
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None

    def __enter__(self) -> None:
        for mode in (self._inference, self._autocast):
            if mode is not None:
                mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in (self._autocast, self._inference):
            if mode is not None:
                mode.__exit__(*error)


_plain = _Plain


# --- keys -------------------------------------------------------------------------------------------------------------


@functools.cache
def _chunk_keys(level: int, device: torch.device) -> Tensor:
    """int8 (16, 1024), one column of the product after the other."""
    raw = bytearray(key_bytes(f"chunk{level}", COLUMNS * CHUNK))
    return torch.frombuffer(raw, dtype=torch.int8).view(COLUMNS, CHUNK).to(device)


@functools.cache
def _last_keys(device: torch.device) -> Tensor:
    """int64 (4096, 16, 2)."""
    raw = bytearray(key_bytes("last", LAST * COLUMNS * LANES * 8))
    return torch.frombuffer(raw, dtype=torch.int64).view(LAST, COLUMNS, LANES).to(device)
