"""A 128-bit digest of a tensor's bytes, computed on the tensor's own device, with no wait for it.

All of it is integer arithmetic that no order of summation can change, so a CPU and a GPU give one digest for the same bytes:

1. the bytes, in index order and little-endian, are cut into chunks of 1024; a chunk, as signed 8-bit numbers, times a fixed
   key matrix gives a vector of 16 32-bit sums. This is an 8-bit matrix product: it reads the bytes once and writes 1/16 of that;
2. while more than 256 vectors are left, their bytes go through step 1 again, with keys of their own for each level;
3. each remaining 32-bit sum times its own 64-bit key, added modulo 2**64; twice, with other keys, is 128 bits. The number of
   bytes times a key is added at the end, so that zeros at the end count.

Steps 1 and 2 are launched when a tensor is recorded, and leave at most 16 KiB; step 3 is for the host, when all is read back.
Here they are torch's operations, on any device; ``tree.py`` does them on a GPU by one kernel, with the same bits.
How unlikely a collision is stands in the README. The keys are public: this finds accidents, it is no signature.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

NAME = "samebits-128-1"
"""Name of the definition above, stated in every trace: digests of different definitions are not comparable."""
CHUNK = 1024
COLUMNS = 16
FAN_IN = CHUNK // (4 * COLUMNS)
"""Vectors that make one chunk of the next level."""
LAST = 256
"""Most vectors that the last step takes."""
LANES = 2
PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Tensors that are nothing but tensors."""
Sums = NDArray[np.int64]
_ALIGNMENT = 16
_BLOCK = 8192
"""Chunks converted to FP32 at a time; bounds the memory of that path to 32 MiB."""
_FEWEST_ROWS = 32
"""``torch._int_mm`` wants more than 16 rows on a GPU."""
_FEW_CHUNKS = 64
"""Below this a tensor that ends in the middle of a chunk is copied as a whole; that is cheaper than two launches."""


def key_bytes(name: str, count: int) -> bytes:
    """``count`` bytes that only depend on ``name``: SHAKE-256, so that no library's random generator is part of the format."""
    return hashlib.shake_256(f"{NAME}/{name}".encode()).digest(count)


LENGTH_KEYS = tuple(int.from_bytes(key_bytes(f"length{lane}", 8), "little") | 1 for lane in range(LANES))


CAPTURED = "made while a CUDA graph was captured: it has no value yet"


def obstacle(tensor: Tensor) -> str | None:
    """Why this tensor has no bytes to digest, or None."""
    why = lasting_obstacle(tensor)
    return CAPTURED if why is None and tensor.is_cuda and capturing() else why


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_current_stream_capturing()


def lasting_obstacle(tensor: Tensor) -> str | None:
    """The same but for what depends on the moment."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a wrapper of torch.func, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta or (type(tensor) not in PLAIN and type(tensor).__name__ == "FakeTensor"):
        return "no data"
    return None


def vectors(tensor: Tensor, lead: int = 0, axis: int = 0) -> tuple[Tensor, Tensor | None, int]:
    """Steps 1 and 2 for the whole tensor, int32 (1, n, 16), and for every row, (rows, n, 16) or None, on the tensor's device.

    ``lead`` axes from ``axis`` on count the rows; with 0 there are none. Also the bytes of a row. Where the rows are in front and
    a multiple of 1024 bytes, both come from one pass over the bytes. Continued by :func:`sums` and :func:`text`.
    """
    with _plain(tensor.device):
        data = _bytes(tensor)
        flat = data.view(1, -1)
        if lead == 0:
            return _reduced(_chunks(flat, 1)), None, 0
        front = tensor.movedim(tuple(range(axis, axis + lead)), tuple(range(lead))) if axis else tensor
        rows = math.prod(front.shape[:lead])
        width = data.numel() // rows if rows else 0
        by_row = _chunks((_bytes(front) if axis else data).view(rows, width), 1)
        shared = axis == 0 and width > 0 and width % CHUNK == 0
        whole = by_row.view(1, -1, COLUMNS) if shared else _chunks(flat, 1)
        return _reduced(whole), _reduced(by_row), width


def sums(found: Tensor) -> Sums:
    """Step 3 without the number of bytes, on the host: int32 (m, n, 16), n at most 256, to int64 (m, 2)."""
    many, count, _ = found.shape
    values = found.numpy().reshape(many, count * COLUMNS).astype(np.int64)
    return values @ _last_keys()[: count * COLUMNS]


def text(found: Sums, size: int) -> str:
    """Digests as 32 hex digits each, one after the other, from :func:`sums`, (m, 2), of ``size`` bytes each."""
    lengths = np.array([_signed(size * key) for key in LENGTH_KEYS], dtype=np.int64)
    return (found + lengths).astype(">i8").tobytes().hex()


def _signed(value: int) -> int:
    """The 64-bit number with the same bits modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


def digest(tensor: Tensor) -> str:
    """Digest of one tensor at once, 32 hex digits; waits for the device. Raises ValueError where there is nothing to digest."""
    why = obstacle(tensor)
    if why is not None:
        raise ValueError(f"cannot digest: {why}")
    whole, _, _ = vectors(tensor)
    with _plain(tensor.device):
        return text(sums(whole.cpu()), tensor.numel() * tensor.element_size())


# --- steps ------------------------------------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes in index order as int8, (bytes,). A view where the tensor is dense and aligned, a copy otherwise."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.int8, device=tensor.device)
    if dense.data_ptr() % _ALIGNMENT:
        dense = dense.clone()
    return dense.view(torch.int8)


def _chunks(data: Tensor, level: int) -> Tensor:
    """Step 1: int8 (m, bytes) to int32 (m, chunks, 16). A last chunk that is not full counts as filled up with zeros."""
    many, width = data.shape
    full, tail = divmod(width, CHUNK)
    if many == 0 or width == 0:
        return torch.zeros(many, 0, COLUMNS, dtype=torch.int32, device=data.device)
    if tail == 0:
        return _product(data.reshape(-1, CHUNK), level).view(many, full, COLUMNS)
    if many == 1 and full >= _FEW_CHUNKS:  # they are read in place, only the tail is copied
        parts = (data[:, : full * CHUNK], data[:, full * CHUNK :])
        return torch.cat([_chunks(part, level) for part in parts], dim=1)
    if full:
        return _chunks(torch.nn.functional.pad(data, (0, CHUNK - tail)), level)
    if width % _ALIGNMENT:
        data = torch.nn.functional.pad(data, (0, -width % _ALIGNMENT))
    return _product(data, level).view(many, 1, COLUMNS)


def _reduced(found: Tensor) -> Tensor:
    """Step 2: int32 (m, chunks, 16) to at most 256 vectors."""
    level = 2
    while found.shape[1] > LAST:
        many, count, _ = found.shape
        if count % FAN_IN:
            found = torch.nn.functional.pad(found, (0, 0, 0, -count % FAN_IN))
        found = _chunks(found.reshape(many, -1).view(torch.int8), level)
        level += 1
    return found


def _product(data: Tensor, level: int) -> Tensor:
    """int8 (n, k) times the first k rows of the keys, k at most 1024: int32 (n, 16), exact."""
    keys = _chunk_keys(level, data.device)[:, : data.shape[1]]
    if not integer_product_is_exact(data.device):
        return _float_product(data, keys)
    count = data.shape[0]
    if data.is_cuda and count < _FEWEST_ROWS:
        return torch._int_mm(torch.nn.functional.pad(data, (0, 0, 0, _FEWEST_ROWS - count)), keys.t())[:count]
    return torch._int_mm(data, keys.t())


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


@contextlib.contextmanager
def _plain(device: torch.device) -> Iterator[None]:
    """Nothing of the caller's modes may touch the arithmetic or see it: autocast would round the sums of the FP32 product, a
    dispatch mode would count or cache our operations, and keys made under inference mode could not be used outside."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), contextlib.ExitStack() as modes:
        if torch._C._len_torch_dispatch_stack():
            modes.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            modes.enter_context(torch.autocast(device.type, enabled=False))
        yield


# --- keys -------------------------------------------------------------------------------------------------------------


@functools.cache
def _chunk_keys(level: int, device: torch.device) -> Tensor:
    """int8 (16, 1024), one column of the product after the other."""
    raw = bytearray(key_bytes(f"chunk{level}", COLUMNS * CHUNK))
    return _settled(torch.frombuffer(raw, dtype=torch.int8).view(COLUMNS, CHUNK).to(device))


@functools.cache
def _last_keys() -> Sums:
    """int64 (256 * 16, 2), for the host: a product that takes all of them wraps at 2**64."""
    return np.frombuffer(key_bytes("last", LAST * COLUMNS * LANES * 8), dtype="<i8").reshape(LAST * COLUMNS, LANES)


def _settled(keys: Tensor) -> Tensor:
    """Keys are used on any stream, so their copy must have arrived."""
    if keys.is_cuda:
        torch.cuda.synchronize(keys.device)
    return keys
