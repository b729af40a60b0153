"""Steps 1 and 2 of the digest on a GPU, by a kernel of ours: one launch for up to 64 MiB, two above, the bits of ``digest.py``.

It reads each byte once, where it lies: dense tensors of any length and alignment, and rows that lie apart where a row is dense and
a multiple of 1024 bytes. Anything else is copied first. The vectors go into memory that was allocated before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.runtime import device as machine
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.verify.trace import digest
from samebits.verify.trace.digest import CHUNK, COLUMNS, FAN_IN, LAST

LEAST_ARCH = 80
DEPTH = 3
"""Most levels of one launch."""
LEVELS = 2 * DEPTH
"""Of keys: two launches, enough for 256 GiB."""
WARPS, ALL_WARPS = 4, 16
"""Of a block; three levels need all of them. With fewer, a small tensor is spread over more multiprocessors."""
MOST_TREES = 65535
SLAB = 1 << 16
"""Vectors of a piece of memory that results are written to: 4 MiB."""
WORD = 4


@dataclass(frozen=True)
class TraceKernel(CudaKernel):
    """A kernel of this folder. It belongs to no operator, so it has no headers but the general ones."""

    @property
    def source(self) -> str:
        return f"verify/trace/{self.entry}.cu"


KERNEL = TraceKernel(op="", entry="digest_tree")


class Vectors(NamedTuple):
    """``many`` times ``each`` vectors from number ``first`` on in ``store``, int32 (vectors, 16)."""

    store: Tensor
    first: int
    many: int
    each: int

    @property
    def nbytes(self) -> int:
        return self.many * self.each * COLUMNS * WORD


# --- what to launch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pass:
    """One launch: ``depth`` levels of ``trees`` trees of equal size."""

    plan: Launch
    numbers: tuple[int, ...]
    """The kernel's ``level`` to ``tree_stride``."""
    trees: int
    count: int
    """Vectors that it leaves of each tree."""


def _pass(level: int, depth: int, width: int, stride: int, runs: int, trees: int, tree_stride: int) -> Pass:
    count = math.ceil(width / CHUNK) * runs
    warps = ALL_WARPS if depth == DEPTH else min(WARPS, math.ceil(count / FAN_IN))
    blocks = math.ceil(count / (warps * FAN_IN))
    for _ in range(depth - 1):
        count = math.ceil(count / FAN_IN)
    plan = Launch(KERNEL, (blocks, trees), 32 * warps)
    return Pass(plan, (level, depth, width, stride, runs, tree_stride), trees, count)


@functools.lru_cache(maxsize=4096)
def passes(
    width: int, runs: int, stride: int, trees: int = 1, tree_stride: int = 0, level: int = 1
) -> tuple[Pass, ...]:
    """Launches that leave at most 256 vectors of each tree; none for no bytes. ``runs`` of ``width`` bytes make a tree.

    RuntimeError: there are too many bytes.
    """
    if width == 0 or runs == 0 or trees == 0:
        return ()
    made: list[Pass] = []
    while True:
        count, depth = math.ceil(width / CHUNK) * runs, 1
        while count > LAST and depth < DEPTH:
            count, depth = math.ceil(count / FAN_IN), depth + 1
        if level + depth - 1 > LEVELS:
            raise RuntimeError("a tensor of more bytes than there are keys for")
        made.append(_pass(level, depth, width, stride if runs > 1 else 0, runs, trees, tree_stride))
        if count <= LAST:
            return tuple(made)
        level, width, runs, tree_stride = level + depth, count * COLUMNS * WORD, 1, count * COLUMNS * WORD


@functools.lru_cache(maxsize=4096)
def of_bytes(shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[Pass, ...] | None:
    """Launches for all bytes of a tensor of elements of ``size`` bytes; None: it must be copied first."""
    found = _runs([(n, s * size) for n, s in zip(shape, strides, strict=True)], size)
    if found is None or (found[0] > 1 and found[1] % CHUNK):
        return None
    runs, width, stride = found
    return passes(width, runs, stride)


@functools.lru_cache(maxsize=4096)
def of_rows(shape: Sequence[int], strides: Sequence[int], size: int, lead: int) -> tuple[Pass, ...] | None:
    """The same for each row, where the first ``lead`` axes count them.

    RuntimeError: there are too many of these long rows.
    """
    axes = [(n, s * size) for n, s in zip(shape, strides, strict=True)]
    inner, outer = _runs(axes[lead:], size), _runs(axes[:lead], None)
    if inner is None or outer is None or inner[0] > 1:
        return None
    rows, width, apart = outer[0], inner[0] * inner[1], outer[2]
    if math.ceil(width / CHUNK) <= LAST:  # no level above: rows are like runs, and chunks of several share a block
        return (_pass(1, 1, width, apart if rows > 1 else 0, rows, 1, 0),) if rows and width else ()
    if rows > MOST_TREES:
        raise RuntimeError(f"{rows} rows of {width} bytes: at most {MOST_TREES} rows of more than {LAST * CHUNK} bytes")
    return passes(width, 1, 0, rows, apart)


def _runs(axes: Sequence[tuple[int, int]], dense: int | None) -> tuple[int, int, int] | None:
    """Axes (size, stride in bytes), outermost first, as (runs, bytes of a run, bytes from run to run), or None.

    Without ``dense``, the size of an element, all axes count runs, of 0 bytes.
    """
    axes = [(n, s) for n, s in axes if n != 1]
    if any(n == 0 for n, _ in axes):
        return 0, 0, 0
    width = dense or 0
    while axes and dense and axes[-1][1] == width:
        width *= axes.pop()[0]
    runs, stride = 1, 0
    for n, s in reversed(axes):
        if runs > 1 and s != runs * stride:
            return None
        runs, stride = runs * n, stride if runs > 1 else s
    return runs, width, stride


# --- launching it -------------------------------------------------------------------------------------------------------


class Slabs:
    """Memory for vectors, by device and stream: what a stream has allocated no other may write to before it. Results stay where
    they are until :meth:`clear`; scratch is used again by whatever comes next on the stream."""

    def __init__(self) -> None:
        self.alone = threading.Lock()
        """Held from the first of several launches to the last: what is between them lies in scratch."""
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._scratch: dict[tuple[int, int], Tensor] = {}

    def take(self, key: tuple[int, int], count: int) -> tuple[Tensor, int]:
        """Room for ``count`` vectors: the memory, and the number of the first."""
        if count > SLAB // 4:
            return _empty(key[0], count), 0
        with self._lock:
            slab, used = self._open.get(key, (None, 0))
            if slab is None or used + count > slab.shape[0]:
                slab, used = _empty(key[0], SLAB), 0
            self._open[key] = slab, used + count
            return slab, used

    def scratch(self, key: tuple[int, int], count: int) -> Tensor:
        with self._lock:
            found = self._scratch.get(key)
            if found is None or found.shape[0] < count:
                found = self._scratch[key] = _empty(key[0], max(SLAB // 16, count))
            return found

    def clear(self) -> None:
        """What was written has been read; the memory may be used for something else."""
        with self._lock:
            self._open.clear()
            self._scratch.clear()


def vectors(tensor: Tensor, lead: int, axis: int, slabs: Slabs) -> tuple[Vectors, Vectors | None, int]:
    """As :func:`samebits.verify.trace.digest.vectors`, for a plain tensor on a GPU for which :func:`usable` holds.

    RuntimeError: the tensor has no memory, or too many long rows.
    """
    index = tensor.get_device()
    if index == torch.cuda.current_device():
        return _vectors(tensor, lead, axis, slabs, index)
    with torch.cuda.device(index):
        return _vectors(tensor, lead, axis, slabs, index)


def _vectors(tensor: Tensor, lead: int, axis: int, slabs: Slabs, index: int) -> tuple[Vectors, Vectors | None, int]:
    size = tensor.element_size()
    if tensor.numel() and not tensor.untyped_storage().data_ptr():
        raise RuntimeError("its memory was given back")
    todo = None if tensor.is_conj() or tensor.is_neg() else of_bytes(tensor.shape, tensor.stride(), size)
    if todo is None:
        tensor = _dense(tensor)
        todo = of_bytes(tensor.shape, tensor.stride(), size)
        assert todo is not None, f"a dense tensor of {tuple(tensor.shape)}"
    key = _current(index)
    if not lead:
        return _run(todo, tensor, 0, slabs, key, 1), None, 0
    front = _rows_in_front(tensor, lead, axis) if axis else tensor
    todo_rows = of_rows(front.shape, front.stride(), size, lead)
    if todo_rows is None:
        front = _dense(front)
        todo_rows = of_rows(front.shape, front.stride(), size, lead)
        assert todo_rows is not None, f"a dense tensor of {tuple(front.shape)}"
    many = math.prod(front.shape[:lead])
    width = front.numel() * size // many if many else 0
    rows = _run(todo_rows, front, 0, slabs, key, many)
    if axis or width == 0 or width % CHUNK or width > LAST * CHUNK:
        return _run(todo, tensor, 0, slabs, key, 1), rows, width
    # The rows' chunks are those of the tensor: what is above them needs no second look at the bytes.
    total = rows.many * rows.each
    if total <= LAST:
        return Vectors(rows.store, rows.first, 1, total), rows, width
    above = passes(total * COLUMNS * WORD, 1, 0, level=2)
    return _run(above, rows.store, rows.first * COLUMNS * WORD, slabs, key, 1), rows, width


def _run(todo: tuple[Pass, ...], data: Tensor, offset: int, slabs: Slabs, key: tuple[int, int], many: int) -> Vectors:
    if not todo:
        return Vectors(_nothing(), 0, many, 0)
    with slabs.alone if len(todo) > 1 else contextlib.nullcontext():
        return _launched(todo, data, offset, slabs, key, many)


def _launched(
    todo: tuple[Pass, ...], data: Tensor, offset: int, slabs: Slabs, key: tuple[int, int], many: int
) -> Vectors:
    keys = _keys(key[0])
    for step in todo[:-1]:
        into = slabs.scratch(key, step.trees * step.count)
        launch(step.plan, data, into, keys, offset, 0, *step.numbers)
        data, offset = into, 0
    last = todo[-1]
    total = last.trees * last.count
    store, first = slabs.take(key, total)
    launch(last.plan, data, store, keys, offset, first, *last.numbers)
    return Vectors(store, first, many, total // many)


def _current(index: int) -> tuple[int, int]:
    """A device and its current stream."""
    return index, torch._C._cuda_getCurrentRawStream(index)


def _dense(tensor: Tensor) -> Tensor:
    """The same bytes in index order."""
    with digest._plain(tensor.device):
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _rows_in_front(tensor: Tensor, lead: int, axis: int) -> Tensor:
    with digest._plain(tensor.device):
        return tensor.detach().movedim(tuple(range(axis, axis + lead)), tuple(range(lead)))


def _empty(index: int, count: int) -> Tensor:
    device = torch.device("cuda", index)
    with digest._plain(device):
        return torch.empty(count, COLUMNS, dtype=torch.int32, device=device)


@functools.cache
def _nothing() -> Tensor:
    return torch.empty(0, COLUMNS, dtype=torch.int32, device="cpu")


@functools.cache
def _keys(index: int) -> Tensor:
    """As the kernel takes them, see :func:`arranged_keys`."""
    device = torch.device("cuda", index)
    with digest._plain(device):
        return digest._settled(arranged_keys().to(device))


def arranged_keys() -> Tensor:
    """int8 (level, step of 64 bytes, product, g, q, word, half of the 16 columns, byte); lane = 4 g + q, see ``digest_tree.cu``.

    A lane's 16 bytes of a step are two words for each product, of column g and of column g + 8.
    """
    found = torch.stack([digest._chunk_keys(level, torch.device("cpu")) for level in range(1, LEVELS + 1)])
    parts = found.view(LEVELS, 2, 8, CHUNK // 64, 4, 2, 2, 4)  # level, half, g, step, q, product, word, byte
    return parts.permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous()


# --- whether it can be used -----------------------------------------------------------------------------------------------


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether this device runs the kernel, and gives the digests of ``digest.py`` for what is tried once. Waits for the device.

    Where a GPU does not, tensors are read by torch's operations instead, several times more slowly, and a warning says so.
    """
    if device.type != "cuda":
        return False
    why = machine.missing("cuda")
    if why is None and machine.info(device).arch < LEAST_ARCH:
        why = f"{machine.info(device).name} is older than compute capability 8.0"
    if why is None:
        try:
            why = _difference(device)
        except Exception as error:  # no compiler, a driver that is too old, no memory: the run must go on
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if why is not None:
        warnings.warn(f"samebits.trace: digests on {device} are made slowly, by torch: {why}", stacklevel=2)
    return why is None


def _difference(device: torch.device) -> str | None:
    """Where kernel and definition differ, over one launch of each depth, aligned and not."""
    with digest._plain(device), contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        values = (torch.arange(LAST * FAN_IN * CHUNK + 4099, device=device) * 2654435761 >> 13).to(torch.int8)
        for tensor in (
            values,
            values[: LAST * CHUNK + 77],
            values[3:5000],
            values[: 16 * CHUNK].view(-1, 4 * CHUNK)[:, :CHUNK],
        ):
            found, _, _ = vectors(tensor, 0, 0, Slabs())
            expected, _, _ = digest.vectors(tensor)
            if not torch.equal(found.store[found.first : found.first + found.each], expected[0]):
                return f"the kernel gives other sums for {tensor.numel()} bytes"
    return None
