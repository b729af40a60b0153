"""Every kind of call that a declaration allows, as metadata: what the audit compiles and the planners are tested on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from samebits.audit.build import Build
from samebits.contract import Contract, OpSpec, Pass, TensorArg
from samebits.dispatch import Call, DeviceInfo, Layout
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.nvrtc import CudaKernel

ROWS = (1, 128, 1024, 4096, 100_000)
ODD, WIDE = 17, 16384
"""Beside the tuned sizes: one that fits no vector, and one that no thread group can hold in registers."""
BETWEEN = (1, 2, 4, 8, 12, 16, 24, 40, 64, 136, 300, 1000, 2048, 8192)
"""Sizes of all axes at once, where planners choose by size. All results are wanted there, or each alone."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


def calls(
    spec: OpSpec,
    device: DeviceInfo,
    rows: tuple[int, ...] = ROWS,
    also: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Iterator[Call]:
    """All directions, contracts and dtypes, aligned and not, at the tuned sizes, an odd and a wide one, and some between.

    ``also``: further sizes of an axis, in every combination with those of the others, where planners choose by several.
    Of the sets of wanted results and absent inputs, those of :func:`_asked`.
    """
    tuned = dict(spec.tuned)
    between = [_sizes(spec, {axis: (size,) for axis, _, _ in spec.size_limits}) for size in BETWEEN]
    named = {axis: (*tuned.get(axis, ()), ODD, WIDE) for axis, _, _ in spec.size_limits}
    if also:
        between.append(_sizes(spec, {axis: (*sizes, *also.get(axis, ())) for axis, sizes in named.items()}))
    sizes = {tuple(full.items()): False for found in between for full in found}
    sizes |= {tuple(full.items()): True for full in _sizes(spec, named)}
    for backward, (chosen, apart), aligned in itertools.product((False, True), sizes.items(), (True, False)):
        full, direction = dict(chosen), spec.direction(backward)
        open_dtype = any(r.dtype == "grad" for r in direction.results)
        out_dtypes = (None, "float32") if direction.wide else (None,)
        asked = list(_asked(direction, backward))
        if not apart:
            asked = [pair for pair in asked if not pair[1]]
        for contract in spec.contracts:
            for given in accepted_together(contract, direction):
                kinds = dict(zip((arg.name for arg in direction.inputs), given, strict=True))
                grad_dtypes = spec.gradient_dtypes_of(kinds) if open_dtype else ("float32",)
                layouts = [
                    (arg.name, dense_layout(arg, dtype, full, aligned))
                    for arg, dtype in zip(direction.inputs, given, strict=True)
                ]
                for wanted, absent in asked:
                    here = tuple(pair for pair in layouts if pair[0] not in absent)
                    for count, grad_dtype, out in itertools.product(rows, grad_dtypes, out_dtypes):
                        size = tuple(full.items())
                        yield Call(
                            spec.name, backward, contract.name, count, size, here, wanted, grad_dtype, device, out
                        )


def _sizes(spec: OpSpec, tried: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """Every combination of sizes, as far as the limits of their axes allow and they fit each other."""
    limits = {axis: (least, most) for axis, least, most in spec.size_limits}
    kept = [dict.fromkeys(min(max(s, limits[axis][0]), limits[axis][1]) for s in tried[axis]) for axis in tried]
    found = (spec.complete(dict(zip(tried, chosen, strict=True))) for chosen in itertools.product(*kept))
    return [sizes for sizes in found if spec.misfit(sizes) is None]


def accepted_together(contract: Contract, direction: Pass) -> Iterator[tuple[str, ...]]:
    """Every choice of a dtype for each input that the contract accepts."""
    names = [arg.name for arg in direction.inputs]
    kin = [[names.index(other) for other in direction.kin(name)] for name in names]
    for given in itertools.product(*(contract.accepted(arg) for arg in direction.inputs)):
        if all(len({given[at] for at in together}) == 1 for together in kin):
            yield given


def dense_layout(arg: TensorArg, dtype: str, sizes: dict[str, int], aligned: bool = True) -> Layout:
    """The layout of a contiguous input. ``aligned`` is what its base address allows; odd rows take it away again."""
    inner = [sizes[axis] for axis in arg.axes]
    first = 0 if arg.rows else 1
    strides = [math.prod(inner[i:]) for i in range(first, len(inner) + 1)]
    return Layout(dtype, tuple(strides), aligned and all(s * _BYTES[dtype] % 16 == 0 for s in strides[:-1]))


def _asked(direction: Pass, backward: bool) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(wanted results, absent inputs). A kernel differs by which of them it has, so each of them must be there and not,
    with and without the others; all combinations would be thousands for five gradients and six optional inputs.

    Everything wanted meets every absence; one result alone, and all but one, meet none and all of them.
    """
    names = tuple(r.name for r in direction.results)
    absences = _absences(direction)
    yield from ((names, absent) for absent in absences)
    alone = [(name,) for name in names]
    others = [tuple(n for n in names if n != name) for name in names]
    for wanted in dict.fromkeys((*alone, *others)) if backward and len(names) > 1 else ():
        yield from ((wanted, absent) for absent in dict.fromkeys((absences[0], absences[-1])))


def _absences(direction: Pass) -> list[tuple[str, ...]]:
    """No optional input absent, each one alone, all: those that only start a fold together, each is for its own kernel."""
    optional = [a.name for a in direction.inputs if a.optional]
    starts = tuple(name for name in optional if name.startswith("start_"))
    alone = [(name,) for name in optional if name not in starts]
    return list(dict.fromkeys(((), *alone, starts, tuple(optional))))


def cuda_builds(
    spec: OpSpec,
    plans: Callable[[Call], tuple[Iterable[Launch], ...]],
    also: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[Build, ...]:
    """Every CUDA kernel that some call can reach under some plan, with the contracts it serves."""
    served: dict[CudaKernel, set[str]] = {}
    for call in calls(spec, H200, also=also):
        for plan in plans(call):
            for step in plan:
                served.setdefault(step.kernel, set()).add(call.contract)
    return tuple(Build(kernel, tuple(sorted(served[kernel]))) for kernel in sorted(served, key=lambda k: k.name))
