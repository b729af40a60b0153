"""Where the vectors of a recording lie on a GPU, and the launches that write them."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.runtime.device import current_device
from samebits.runtime.launch import Launch, launch
from samebits.verify.trace import digest
from samebits.verify.trace.digest import CHUNK, COLUMNS, LAST
from samebits.verify.trace.tree import KERNEL, VECTOR, Part, above, arranged_keys, of_bytes, of_rows

MOST = 16
"""Parts of one launch."""
WARPS, TILES = 16, 4
"""Of a block: its warps, and the tiles that are worth one; few, so that a small tensor is spread over the multiprocessors."""
PER_PROCESSOR = 2
"""Blocks that a multiprocessor takes at a time; more would load the keys again."""
SLAB = 1 << 16
"""Vectors of a piece of memory that results are written to: 4 MiB."""
SCRATCH = 1 << 17
"""The same of memory for vectors that levels are missing of: 8 MiB, of 2 GiB of tensors."""
_PART = struct.Struct("<QQIIIIqqqqq")
_END = struct.Struct("<qq")
_BEHIND = 2**32 - 1


@dataclass(eq=False, slots=True)
class Vectors:
    """``many`` times ``each`` vectors from number ``first`` on in ``store``, int32 (vectors, 16)."""

    many: int = 1
    each: int = 0
    store: Tensor | None = None
    first: int = 0
    level: int = 0
    """The next one, where more than 256 are there of each."""

    @property
    def count(self) -> int:
        return self.many * self.each

    @property
    def value(self) -> Tensor:
        """(many, each, 16), where they lie."""
        assert self.store is not None, "launched"
        return self.store[self.first : self.first + self.count].view(self.many, self.each, COLUMNS)


class Job(NamedTuple):
    """A part, where its bytes begin, and what it leaves."""

    data: Tensor
    offset: int
    part: Part
    into: Vectors


def job(tensor: Tensor, part: Part, into: Vectors) -> Job:
    """What to launch for a plain tensor on a GPU. RuntimeError: it has no memory."""
    if part.tiles and not tensor.untyped_storage().data_ptr():
        raise RuntimeError("its memory was given back")
    into.each, into.level = part.each, part.next_level
    return Job(tensor, 0, part, into)


def jobs(tensor: Tensor, into: Vectors, lead: int = 0, axis: int = 0) -> tuple[Job | None, Job | None, int]:
    """The same for any such tensor and its rows, and the bytes of a row. ``into``: where all of it will be.

    Without the first, all of it begins with what the rows leave. Otherwise as :func:`samebits.verify.trace.digest.vectors`.
    RuntimeError: the tensor has no memory, or too many bytes.
    """
    size = tensor.element_size()
    todo = None if tensor.is_conj() or tensor.is_neg() else of_bytes(tensor.shape, tensor.stride(), size)
    if todo is None:
        if tensor.numel() and not tensor.untyped_storage().data_ptr():
            raise RuntimeError("its memory was given back")
        tensor = _dense(tensor)
        todo = of_bytes(tensor.shape, tensor.stride(), size)
        assert todo is not None, f"a dense tensor of {tuple(tensor.shape)}"
    whole = job(tensor, todo, into)
    if not lead:
        return whole, None, 0
    front = _rows_in_front(tensor, lead, axis) if axis else tensor
    by_row = of_rows(front.shape, front.stride(), size, lead)
    if by_row is None:
        front = _dense(front)
        by_row = of_rows(front.shape, front.stride(), size, lead)
        assert by_row is not None, f"a dense tensor of {tuple(front.shape)}"
    many = math.prod(front.shape[:lead])
    width = front.numel() * size // many if many else 0
    each = by_row.each * by_row.trees // many if many else 0
    rows = Job(front, 0, by_row, Vectors(many, each, level=by_row.next_level))
    if axis or width == 0 or width % CHUNK or width > LAST * CHUNK:
        return whole, rows, width
    # The rows' chunks are those of the tensor: what is above them needs no second look at the bytes.
    into.each, into.level = rows.into.count, 2
    return None, rows, width


class Memories:
    """Of one recording, by device and stream: what a stream has allocated no other may write to before it. Used by one thread at a
    time. Results stay where they are until :meth:`clear`."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[int, int], _Memory] = {}

    def launch(self, todo: Sequence[Job], shared: Sequence[tuple[Vectors, Vectors]] = ()) -> int:
        """On the current stream of the device of the first, on which all are; all of one level. Nothing waits.

        ``shared``: vectors that a job leaves, and as what they are the beginning of others.
        Returns how many bytes are left in the end.
        """
        index = todo[0].data.get_device()
        stream = _current(index)
        if stream is None:
            with torch.cuda.device(index):
                return self.launch(todo, shared)
        memory = self._by_stream.get((index, stream))
        if memory is None:
            memory = self._by_stream[index, stream] = _Memory(index)
        count = memory.launch(todo)
        for left, beginning in shared:
            count += memory.share(left, beginning)
        return count * VECTOR

    def finish(self) -> None:
        """Launch every level that is missing. What was launched on other streams must have ended."""
        for (index, _), memory in self._by_stream.items():
            with nullcontext() if _current(index) is not None else torch.cuda.device(index):
                while memory.waiting:
                    memory.raise_level()

    def clear(self) -> None:
        """What was written has been read; the memory may be used for something else."""
        self._by_stream.clear()


@dataclass(eq=False, slots=True)
class _Memory:
    """Of one stream."""

    index: int
    slab: Tensor | None = None
    used: int = 0
    scratch: Tensor | None = None
    filled: int = 0
    waiting: list[Vectors] = field(default_factory=list)
    """What levels are missing of, in scratch or memory of its own. What has been read in scratch is written over by what comes
    next on the stream."""

    def launch(self, todo: Sequence[Job]) -> int:
        """How many vectors are left in the end."""
        if len(todo) > MOST:
            return self.launch(todo[:MOST]) + self.launch(todo[MOST:])
        missing = left = 0
        for _, _, _, into in todo:
            if into.each > LAST:
                missing += into.many * into.each
                left += into.many * LAST
            else:
                left += into.many * into.each
        if missing:
            self._make_room(missing)
        slab, used = self.slab, self.used
        if missing or slab is None or left > SLAB // 4 or used + left > slab.shape[0]:
            for _, _, _, into in todo:
                self._place(into)
        else:  # the usual
            for _, _, _, into in todo:
                into.store, into.first = slab, used
                used += into.many * into.each
            self.used = used
        start(todo, self.index)
        return left

    def share(self, left: Vectors, beginning: Vectors) -> int:
        beginning.store, beginning.first = left.store, left.first
        if beginning.each <= LAST:
            return 0
        self.waiting.append(beginning)
        return LAST

    def raise_level(self) -> None:
        """The next levels of all that wait."""
        waiting, self.waiting, self.filled = self.waiting, [], 0
        for level in sorted({vectors.level for vectors in waiting}):
            todo = []
            for vectors in waiting:
                if vectors.level == level:
                    part = above(vectors.each, level, vectors.many)
                    assert vectors.store is not None
                    todo.append(Job(vectors.store, vectors.first * VECTOR, part, vectors))
                    vectors.each, vectors.level = part.each, part.next_level
            for at in range(0, len(todo), MOST):
                for job in todo[at : at + MOST]:
                    self._place(job.into, alone=True)
                start(todo[at : at + MOST], self.index)

    def _make_room(self, count: int) -> None:
        if self.scratch is None or self.filled + count > self.scratch.shape[0]:
            if self.waiting:
                self.raise_level()
            if self.scratch is None or count > self.scratch.shape[0]:
                self.scratch = _empty(self.index, max(SCRATCH, count))

    def _place(self, vectors: Vectors, alone: bool = False) -> None:
        """Decide where they will be written. ``alone``: not to scratch, which is being read."""
        count = vectors.many * vectors.each
        if vectors.each > LAST:
            if alone:
                vectors.store, vectors.first = _empty(self.index, count), 0
            else:
                vectors.store, vectors.first = self.scratch, self.filled
                self.filled += count
            self.waiting.append(vectors)
        elif count > SLAB // 4:
            vectors.store, vectors.first = _empty(self.index, count), 0
        else:
            if self.slab is None or self.used + count > self.slab.shape[0]:
                self.slab, self.used = _empty(self.index, SLAB), 0
            vectors.store, vectors.first = self.slab, self.used
            self.used += count


# --- launching ----------------------------------------------------------------------------------------------------------


class Words(ctypes.Array):  # type: ignore[type-arg]
    """The kernel's table of parts, which a launch copies."""

    _type_ = ctypes.c_char
    _length_ = MOST * _PART.size + _END.size

    def getPtr(self) -> int:
        return ctypes.addressof(self)


def start(todo: Sequence[Job], index: int) -> None:
    """One launch, on the current stream of the current device."""
    try:
        words = _own.words
    except AttributeError:
        words = _own.words = Words()
    tiles = fill(words, todo, Tensor.data_ptr)
    if tiles:
        launch(grid(tiles, index), words, keys_at(index, todo[0].part.level))


def fill(words: Words, todo: Sequence[Job], address: Callable[[Tensor], int]) -> int:
    """The table of parts, and how many tiles they have."""
    tiles = deep = at = 0
    for data, offset, part, into in todo:
        if part.tiles:
            assert into.store is not None
            out = address(into.store) + into.first * VECTOR
            _pack(words, at, address(data) + offset, out, tiles, *part.numbers, part.deep)
            at += _SIZE
            tiles += part.tiles
            deep |= part.deep
    if tiles >= _BEHIND:
        raise RuntimeError("tensors of too many bytes for one launch")
    if at < MOST * _SIZE:
        _pack(words, at, 0, 0, _BEHIND, *_NO_NUMBERS)
    _END.pack_into(words, MOST * _SIZE, tiles, deep)
    return tiles


_pack, _SIZE = _PART.pack_into, _PART.size
_NO_NUMBERS = (0,) * 8
_own = threading.local()


@functools.lru_cache(maxsize=4096)
def grid(tiles: int, index: int) -> Launch:
    return _launch_of(min(math.ceil(tiles / TILES), PER_PROCESSOR * _processors(index)))


@functools.cache
def _launch_of(blocks: int) -> Launch:
    return Launch(KERNEL, blocks, 32 * WARPS)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def keys(index: int, level: int) -> Tensor:
    """Of a level and all above it, as the kernel takes them, see :func:`arranged_keys`."""
    return _all_keys(index)[level - 1 :]


@functools.cache
def keys_at(index: int, level: int) -> int:
    """Their address; they stay."""
    return keys(index, level).data_ptr()


@functools.cache
def _all_keys(index: int) -> Tensor:
    device = torch.device("cuda", index)
    with digest._plain(device):
        return digest._settled(arranged_keys().to(device))


def _current(index: int) -> int | None:
    """The current stream of a device; None where another device is the current one."""
    stream: int | None = torch._C._cuda_getCurrentRawStream(index) if index == current_device() else None
    return stream


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
