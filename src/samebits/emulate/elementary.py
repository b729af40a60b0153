"""The reference with the elementary functions that an emulated kernel has, so that bits can be compared.

``rsqrt``, ``exp``, ``sin`` and ``cos`` of a GPU are its own, and a CPU's others. Emulated kernels take correctly rounded ones,
from the same shared object as :class:`Elementary`, which puts them under torch's names. ``sigmoid`` is 1 / (1 + exp(-x)), as
torch computes it on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samebits.emulate import launch

_NUMBERS = {"rsqrt": 0, "exp": 1, "sin": 2, "cos": 3}


class Elementary(TorchFunctionMode):
    """While it is open, FP32 elementary functions on the CPU are those of the emulator."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float32 and not kwargs:
            if name in _NUMBERS:
                return _rounded(_NUMBERS[name], args[0])
            if name == "sigmoid":
                one = torch.ones_like(args[0])
                return one / (one + _rounded(_NUMBERS["exp"], -args[0]))
        return func(*args, **(kwargs or {}))


def _rounded(number: int, x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    launch.runtime().samebits_elementary(ctypes.c_int(number), *pointers, ctypes.c_size_t(x.numel()))
    return out
