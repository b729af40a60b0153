"""What follows from a tensor's dtype, shape, strides and device, looked up once for all tensors that share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.verify.trace import digest, probe
from samebits.verify.trace.tree import Part, of_bytes

KNOWN = 4096
"""Layouts that are kept; where shapes never repeat, old ones are of no use."""


@dataclass(eq=False, slots=True)
class Layout:
    """As a record has it, and what its digest must know."""

    why: str | None
    """Why tensors like this have no digest."""
    kind: torch.dtype
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    index: int
    """Of a GPU."""
    key: Any
    """Of no other layout; None where the tensor is no plain one."""
    view: Any
    """What the tensor shows of its storage from its address on: so many bytes where they lie one behind the other, in index order
    and as they are; else the key."""
    counted: bool
    """torch counts the writes to it."""
    nbytes: int
    is_cuda: bool
    fast: bool
    """Our kernel reads it."""
    part: Part | None
    """Where it lies; None: it must be copied first, or is too large."""
    direct: Part | None
    """The same where writes are counted as well."""


class Layouts:
    """By what torch dispatches on, dtype, shape, strides and device. Safe to use from several threads."""

    def __init__(self) -> None:
        self.known: dict[Any, Layout] = {}
        self.direct: dict[Any, Layout] = {}
        """Those that have ``direct``, by dtype, shape, strides and device, for tensors that are strided, neither conjugated nor
        negated and count their writes."""

    def of(self, tensor: Tensor) -> Layout:
        if type(tensor) not in digest.PLAIN:
            return _layout(tensor, None)
        try:
            key = key_of(tensor)
        except RuntimeError:  # sparse or nested: it has no strides
            return _layout(tensor, None)
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= KNOWN:
                self.known.clear()
                self.direct.clear()
            found = self.known[key] = _layout(tensor, key)
            if found.direct is not None and not found.kind.is_complex:
                self.direct[found.kind, tensor.shape, tensor.stride(), tensor.device] = found
        return found


def key_of(tensor: Tensor) -> Any:
    """The dispatch keys tell all that :func:`digest.lasting_obstacle` asks, and conjugation, negation and inference mode."""
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    return keys, tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()


def _layout(tensor: Tensor, key: Any) -> Layout:
    why, on_gpu = digest.lasting_obstacle(tensor), _is_on_gpu(tensor)
    nbytes = 0 if why is not None else tensor.numel() * tensor.element_size()
    dense = why is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    # A tensor class of somebody's own may have no memory behind it; torch asks the class.
    fast = why is None and key is not None and on_gpu and probe.usable(tensor.device)
    strided = why is None or (tensor.layout is torch.strided and not tensor.is_nested)
    counted = key is not None and why is None and not tensor.is_inference()
    part = _part(tensor) if fast else None
    return Layout(
        why,
        tensor.dtype,
        str(tensor.dtype).removeprefix("torch."),
        () if tensor.is_nested else tuple(tensor.shape),
        tuple(tensor.stride()) if strided else (),
        str(tensor.device),
        tensor.get_device() if on_gpu else -1,
        key,
        nbytes if dense else key,
        counted,
        nbytes,
        on_gpu,
        fast,
        part,
        part if counted else None,
    )


def _part(tensor: Tensor) -> Part | None:
    if tensor.is_conj() or tensor.is_neg():
        return None
    try:
        return of_bytes(tensor.shape, tensor.stride(), tensor.element_size())
    except RuntimeError:
        return None


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
