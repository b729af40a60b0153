"""The launches of a call, written down once: what is left of a call that is repeated is to fill in addresses.

What a backend launches follows from metadata: kernels, numbers, and which tensor an argument is. :func:`recorded` lets it run
on stand-ins, tensors of the meta device with the shapes and strides of the real ones; :func:`samebits.runtime.launch.launch`
and :func:`samebits.runtime.tensor_map.tensor_map` then note what they are given. A run that does more with its tensors than to
look at their metadata, to make views and to allocate has no program, and is called each time.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.runtime import launch as launching
from samebits.runtime import tensor_map as mapping
from samebits.runtime.launch import Launch

KNOWN_MAPS = 1024
"""Tensor maps that an argument remembers, by address: fifty blocks of a model have as many weights of one form."""
ALIGNMENT = 512
"""Bytes: what lies between launches starts where torch's allocator would have put it."""


class Form(NamedTuple):
    """A tensor without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def form_of(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def dense(shape: Sequence[int], dtype: torch.dtype) -> Form:
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return Form(tuple(shape), tuple(strides), dtype)


class _Address(NamedTuple):
    """A word that is the address of a tensor: its place among those of the call, and bytes behind its first element."""

    at: int
    slot: int
    offset: int


class _Map(NamedTuple):
    """Words in whose place a tensor map stands."""

    at: tuple[int, ...]
    slot: int
    offset: int
    form: Form
    box: tuple[int, ...]
    swizzle: bool
    known: dict[int, tuple[int, Any]]
    """By address of the tensor: where the map lies, and the map."""


class Program:
    """Launches in their order, and the memory between them."""

    def __init__(
        self,
        launches: Sequence[tuple[Launch, int]],
        words: Sequence[int],
        addresses: Sequence[_Address],
        maps: Sequence[_Map],
        temporaries: Sequence[int],
    ) -> None:
        """``launches``: each with the number of its first word among ``words``; ``temporaries``: bytes."""
        self.launches = tuple(launches)
        self.words = tuple(words)
        self.addresses = tuple(addresses)
        self.maps = tuple(maps)
        self.offsets, end = [], 0
        for size in temporaries:
            self.offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.bytes = end
        self._frames: list[_Frame] = []

    def run(self, addresses: list[int], where: torch.device) -> None:
        """Enqueue on the current stream of the current device, which is ``where`` and the same each time.

        ``addresses`` are those of the tensors that were given when it was recorded, in their order; the list is used up.
        """
        held: list[Any] = []
        if self.bytes:
            made = torch.empty_strided((self.bytes,), (1,), dtype=torch.uint8, device=where)
            held.append(made)
            first = made.data_ptr()
            addresses += [first + offset for offset in self.offsets]
        device = launching.bound_device()
        try:
            frame = self._frames.pop()  # taken, so that nobody who interrupts this call writes into it
        except IndexError:
            frame = _Frame(self, device)
        words = frame.words
        for at, slot, offset in self.addresses:
            words[at] = addresses[slot] + offset
        for one in self.maps:
            address = addresses[one.slot] + one.offset
            place, made_map = one.known.get(address) or _encoded(one, address)
            held.append(made_map)  # another thread may forget it meanwhile
            for at in one.at:
                frame.places[at] = place
        launching.enqueue(frame.launches, device)
        self._frames.append(frame)


class _Frame:
    """The words of a program's launches, and their addresses, as the driver takes them."""

    __slots__ = ("launches", "places", "words")

    def __init__(self, program: Program, device: int) -> None:
        self.words = array("q", program.words)
        first, count = self.words.buffer_info()
        self.places = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        row = ctypes.addressof(self.places)
        self.launches = [(launching.ready(plan, device), row + 8 * start) for plan, start in program.launches]


def _encoded(one: _Map, address: int) -> tuple[int, Any]:
    made = mapping.encoded(address, one.form.dtype, one.form.shape, one.form.strides, one.box, one.swizzle)
    if len(one.known) >= KNOWN_MAPS:
        one.known.clear()
    found = one.known[address] = (made.getPtr(), made)
    return found


# --- recording --------------------------------------------------------------------------------------------------------


class _NotMetadata(Exception):
    """Raised through a run that does more than a program can repeat."""


class _MapNote(NamedTuple):
    tensor: Tensor
    box: tuple[int, ...]
    swizzle: bool


class Recorder:
    """What is noted of a run. ``tensors``: the stand-ins, each with storage of its own."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._slots = {_storage(tensor): slot for slot, tensor in enumerate(tensors) if tensor is not None}
        self._first_temporary = len(tensors)
        self._held: list[Any] = []
        self.launches: list[tuple[Launch, int]] = []
        self.words: list[int] = []
        self.addresses: list[_Address] = []
        self.maps: dict[tuple[Any, ...], _Map] = {}
        self.temporaries: list[int] = []

    def launch(self, plan: Launch, arguments: Sequence[Any]) -> None:
        self.launches.append((plan, len(self.words)))
        for argument in arguments:
            at = len(self.words)
            word = 0
            if isinstance(argument, int):
                word = int(argument)
            elif isinstance(argument, Tensor):
                self.addresses.append(_Address(at, *self._place(argument)))
            elif isinstance(argument, ctypes.c_float):
                (word,) = struct.unpack("<i", struct.pack("<f", argument.value))
            elif isinstance(argument, _MapNote):
                self._map(at, argument)
            else:
                raise _NotMetadata(f"an argument of type {type(argument).__name__}")
            self.words.append(word)

    def map(self, tensor: Tensor, box: tuple[int, ...], swizzle: bool) -> Any:
        return _MapNote(tensor, box, swizzle)

    def program(self) -> Program:
        return Program(self.launches, self.words, self.addresses, tuple(self.maps.values()), self.temporaries)

    def _map(self, at: int, note: _MapNote) -> None:
        tensor, box, swizzle = note
        place = self._place(tensor)
        form = form_of(tensor)
        key = (*place, form, box, swizzle)
        known = self.maps.get(key)
        earlier = () if known is None else known.at
        self.maps[key] = _Map((*earlier, at), *place, form, box, swizzle, {})

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """The tensor that an argument is, or is a view of, and where in it."""
        if not tensor.is_meta:
            raise _NotMetadata(f"a tensor on {tensor.device}")
        self._held.append(tensor)  # so that no other storage gets its number
        storage = _storage(tensor)
        if storage not in self._slots:
            self._slots[storage] = self._first_temporary + len(self.temporaries)
            self.temporaries.append(tensor.untyped_storage().nbytes())
        return self._slots[storage], int(tensor.storage_offset()) * tensor.element_size()


def recorded(run: Callable[[list[Any]], None], forms: Sequence[Form | None]) -> Program | None:
    """What ``run`` launches when it is given tensors of these forms (None: nothing), or None where that is not all that it does."""
    tensors: list[Tensor | None] = [
        None if form is None else torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
        for form in forms
    ]
    recorder = Recorder(tensors)
    try:
        with launching.noting(recorder), _MetadataOnly():
            run(list(tensors))
    except _NotMetadata:
        return None
    return recorder.program()


class _MetadataOnly(TorchDispatchMode):
    """Lets nothing pass that reads or writes a value."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func not in _ALLOCATING:
            raise _NotMetadata(str(func))
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_ALLOCATING = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
