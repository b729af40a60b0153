"""Every kind of call that a declaration allows, as metadata: what the audit compiles and the planners are tested on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from samebits.audit.build import Build
from samebits.contract import OpSpec, Pass, TensorArg
from samebits.dispatch import Call, DeviceInfo, Layout
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.nvrtc import CudaKernel

ROWS = (1, 128, 1024, 4096, 100_000)
ODD, WIDE = 17, 16384
"""Beside the tuned sizes: one that fits no vector, and one that no thread group can hold in registers."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def calls(spec: OpSpec, device: DeviceInfo, rows: tuple[int, ...] = ROWS) -> Iterator[Call]:
    """All directions, contracts, dtypes, subsets of results, aligned and not, at the tuned sizes, an odd and a wide one."""
    tuned = dict(spec.tuned)
    axes = [axis for axis, _, _ in spec.size_limits]
    tried = [
        dict.fromkeys(min(max(size, least), most) for size in (*tuned.get(axis, ()), ODD, WIDE))
        for axis, least, most in spec.size_limits
    ]
    sizes = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*tried)]
    for contract, backward, size, count in itertools.product(spec.contracts, (False, True), sizes, rows):
        full = spec.complete(size)
        direction = spec.direction(backward)
        names = [r.name for r in direction.results]
        subsets = _subsets(names) if backward else [tuple(names)]
        absent = _absences(direction)
        dtypes = itertools.product(*([(a, d) for d in contract.accepted(a)] for a in direction.inputs))
        open_dtype = any(r.dtype == "grad" for r in direction.results)
        for given, missing, wanted, grad_dtype, aligned in itertools.product(
            dtypes, absent, subsets, ("float32", "bfloat16") if open_dtype else ("float32",), (True, False)
        ):
            layouts = tuple(
                (arg.name, dense_layout(arg, dtype, full, aligned)) for arg, dtype in given if arg.name not in missing
            )
            yield Call(
                spec.name, backward, contract.name, count, tuple(full.items()), layouts, wanted, grad_dtype, device
            )


def dense_layout(arg: TensorArg, dtype: str, sizes: dict[str, int], aligned: bool = True) -> Layout:
    """The layout of a contiguous input. ``aligned`` is what its base address allows; odd rows take it away again."""
    inner = [sizes[axis] for axis in arg.axes]
    first = 0 if arg.rows else 1
    strides = [math.prod(inner[i:]) for i in range(first, len(inner) + 1)]
    return Layout(dtype, tuple(strides), aligned and all(s * _BYTES[dtype] % 16 == 0 for s in strides[:-1]))


def _absences(direction: Pass) -> list[tuple[str, ...]]:
    """Every subset of the optional inputs, but all the starts of folds together: each is read by its own kernel."""
    optional = [a.name for a in direction.inputs if a.optional]
    starts = tuple(name for name in optional if name.startswith("start_"))
    others = [*_subsets([name for name in optional if name not in starts]), ()]
    return [*others, *(absent + starts for absent in others if starts)]


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    return [c for n in range(len(names), 0, -1) for c in itertools.combinations(names, n)]


def cuda_builds(spec: OpSpec, plans: Callable[[Call], tuple[Iterable[Launch], ...]]) -> tuple[Build, ...]:
    """Every CUDA kernel that some call can reach under some plan, with the contracts it serves."""
    served: dict[CudaKernel, set[str]] = {}
    for call in calls(spec, H200):
        for plan in plans(call):
            for step in plan:
                served.setdefault(step.kernel, set()).add(call.contract)
    return tuple(Build(kernel, tuple(sorted(served[kernel]))) for kernel in sorted(served, key=lambda k: k.name))
