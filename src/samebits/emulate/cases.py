"""The calls on which an operator's kernels are emulated, from its declaration: which kernels, at which shapes, on what inputs."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits import registry
from samebits.checks import DTYPES
from samebits.contract import OpSpec, TensorArg
from samebits.dispatch import Call
from samebits.runtime import nvrtc, sweep
from samebits.runtime.device import H200
from samebits.runtime.nvrtc import CudaKernel
from samebits.verify import layouts
from samebits.verify.operators import OperatorSubject, draw

ROWS = (1, 5, 33, 300)
"""One; less than any tile; an odd number of tiles for most; more than the 256 positions of a tile of table rows."""
MOST = 1_000_000
"""Work of a call, at most."""
LAYOUTS = {"misaligned": layouts.misaligned(1), "window": layouts.column_window, "steps": layouts.row_slice}


@dataclass(frozen=True)
class Case:
    """A call and one of its plans."""

    call: Call
    plan: int
    kernels: tuple[CudaKernel, ...]

    def __str__(self) -> str:
        call = self.call
        sizes = " ".join(f"{axis}={size}" for axis, size in (("T", call.rows), *call.sizes))
        inputs = " ".join(f"{name}:{layout.dtype}{'' if layout.aligned else '/1'}" for name, layout in call.layouts)
        direction = f"backward ({', '.join(call.wanted)} as {call.grad_dtype})" if call.backward else "forward"
        if call.out_dtype is not None:
            direction += f" in {call.out_dtype}"
        return f"{call.op} {call.contract} {direction}, {sizes}, {inputs}, plan {self.plan}"


def work(call: Call) -> int:
    """What a case costs, more or less: rows times the elements of the largest input, of one row where it has rows."""
    sizes, given = dict(call.sizes), dict(call.layouts)
    args = registry.spec(call.op).direction(call.backward).inputs
    return call.rows * max(math.prod(sizes[axis] for axis in arg.axes) for arg in args if arg.name in given)


def candidates(
    spec: OpSpec,
    rows: tuple[int, ...] = ROWS,
    sizes: Mapping[str, int] | None = None,
    most: int = MOST,
    among: int | None = None,
) -> Iterator[Case]:
    """Every call of the sweep at these rows with at most ``most`` work, with each of its plans; ``among``: of so many calls,
    drawn with a fixed seed."""
    module = importlib.import_module(f"samebits.ops.{spec.name}.cuda")
    refuses = getattr(module, "refuses", lambda call: None)
    left_out = gpu_only(spec)
    held = {
        axis: ((sizes or {}).get(axis, least), (sizes or {}).get(axis, most)) for axis, least, most in spec.size_limits
    }
    swept = dataclasses.replace(spec, size_limits=tuple((axis, *limits) for axis, limits in held.items()))
    calls = [call for call in sweep.calls(swept, H200, rows) if call.wanted and work(call) <= most]
    if among is not None and among < len(calls):
        calls = random.Random(0).sample(calls, among)
    for call in calls:
        if refuses(call) is None:
            for number, plan in enumerate(module.plans(call)):
                if not any(step.kernel.entry in left_out for step in plan):
                    yield Case(call, number, tuple(step.kernel for step in plan))


def gpu_only(spec: OpSpec) -> tuple[str, ...]:
    """Kernels of the operator that use what is not modelled here; plans with one of them are left out, and the command says so."""
    module = importlib.import_module(f"samebits.ops.{spec.name}.cuda")
    return tuple(getattr(module, "GPU_ONLY", ()))


def chosen(cases: Iterable[Case]) -> list[Case]:
    """Of the cases that run a kernel in the same way (contract, wanted results, inputs that are there), the smallest and the
    largest one."""
    ranked = sorted(cases, key=lambda case: work(case.call))
    kept: dict[Case, None] = {}
    for ordered in (ranked, ranked[::-1]):
        seen: set[object] = set()
        for case in ordered:
            ways = {(k, case.call.contract, case.call.wanted, _present(case.call)) for k in case.kernels}
            if not ways <= seen:
                seen |= ways
                kept[case] = None
    return list(kept)


def sampled(cases: Iterable[Case], kernels: int, calls: int) -> list[Case]:
    """A few of the cases, which compile at most ``kernels`` builds unless there are more kernels than that: every kernel in
    every direction, then whatever else few builds can run. The same sources give the same sample, other sources another;
    operators that share kernels get the same builds of them."""
    order: dict[CudaKernel, bytes] = {}
    ranks: list[tuple[bytes, bytes, Case]] = []
    for case in cases:
        for kernel in case.kernels:
            if kernel not in order:
                order[kernel] = _hash(kernel.name, nvrtc.source_text(kernel))
        ranks.append((max(order[kernel] for kernel in case.kernels), _hash(str(case)), case))
    kept: dict[Case, None] = {}
    built: set[CudaKernel] = set()
    seen: set[object] = set()
    for *_, case in sorted(ranks, key=lambda rank: rank[:2]):
        ways = {(kernel.op, kernel.entry, case.call.backward) for kernel in case.kernels}
        if not ways <= seen:
            seen |= ways
            built |= set(case.kernels)
            kept[case] = None
    for _, _, case in sorted(ranks, key=lambda rank: rank[1]):
        if len(kept) < calls and len(built | set(case.kernels)) <= max(kernels, len(built)):
            built |= set(case.kernels)
            kept[case] = None
    return list(kept)


def _hash(*parts: str) -> bytes:
    return hashlib.sha256("\n".join(parts).encode()).digest()


def _present(call: Call) -> tuple[str, ...]:
    return tuple(name for name, _ in call.layouts)


def inputs(call: Call, layout: str = "", pattern: str = "normal") -> list[Tensor | None]:
    """Tensors for a call, in the order of the declaration. Where the call has an input that is not aligned, its view is not."""
    subject = _Drawn(call, pattern)
    batch = subject.batch(range(call.rows))
    names = [arg.name for arg in subject.spec.direction(call.backward).inputs]
    drawn = subject.backward_inputs(batch, subject.forward(batch)) if call.backward else map(batch.tensor, names)
    return [_laid_out(call, name, tensor, layout) for name, tensor in zip(names, drawn, strict=True)]


def _laid_out(call: Call, name: str, tensor: Tensor, layout: str) -> Tensor | None:
    if not call.has(name):
        return None
    if not layout and call.layout(name).aligned:
        return tensor
    view = LAYOUTS[layout or "misaligned"](tensor)
    return tensor if view is None else view


class _Drawn(OperatorSubject):
    """Inputs of the dtypes of one call. What a gradient is added to is no zero."""

    def __init__(self, call: Call, pattern: str) -> None:
        self._call = call
        sizes = {axis: call.size(axis) for axis, _, _ in registry.spec(call.op).size_limits}
        cpu = torch.device("cpu")
        super().__init__(call.op, call.contract, "reference", cpu, None, call.rows, 0, sizes, pattern)

    def _choose_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        given = {name: DTYPES[layout.dtype] for name, layout in self._call.layouts}
        chosen = super()._choose_dtypes(dtype)
        for direction in (self.spec.forward, self.spec.backward):
            for arg in direction.inputs:
                known = [given[other] for other in direction.kin(arg.name) if other in given]
                if arg.name in chosen and known:
                    given[arg.name] = chosen[arg.name] = known[0]
        return chosen

    def _zeros(self, arg: TensorArg, rows: int) -> Tensor:
        call = self._call
        dtype = DTYPES[call.layout(arg.name).dtype if call.has(arg.name) else arg.dtypes[0]]
        return draw(self.spec, arg, range(rows), self.sizes, 0, dtype)
