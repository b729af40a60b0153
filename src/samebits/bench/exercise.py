"""A few launches of every kernel variant on small and odd shapes: what the memory and race checkers watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits import catalogue, dispatch, registry
from samebits.checks import DTYPES, dtype_name
from samebits.contract import Contract, OpSpec, TensorArg
from samebits.operator import Operator
from samebits.verify.operators import derived, draw

ROWS = (1, 3, 33)
ODD_SIZES = (17, 136)
"""One that no vector load fits, one that fits with a ragged tail."""
LONG_SIZES = ((2, 40000, False), (1, 131072, False))
"""(rows, size, strided): rows that fill the shared memory of a block, and rows that come through it in several chunks. Few
rows and few calls, because a checker follows every addition of a chain."""
LONG = 2**15
"""From here on a row is long."""
OFFSET = 3
"""Elements before each row of a strided input, so that its rows are not aligned."""


def exercise(name: str, device: torch.device, backends: tuple[str, ...] | None = None, long_rows: bool = True) -> int:
    """Run every (contract, backend, direction, plan) at all :func:`shapes`; the number of calls. Nothing is compared.

    The most rows of :data:`ROWS` come with every dtype, absent input and subset of results, of these one at a time, and strided
    rows with every dtype. Elsewhere one dtype and all results together must do: a checker makes a launch hundreds of times slower.

    Inputs are drawn on the CPU, so that under a checker nearly all kernels on the device are ours. Without ``long_rows`` those of
    :data:`LONG` and more stay away: a checker that follows every access to shared memory needs many minutes for their chains,
    whose steps are those of shorter ones.
    """
    op = registry.operator(name)
    chosen = backends or tuple(b.name for b in op.spec.backends if b.name != "reference")
    count = 0
    for rows, size, strided in shapes(op.spec):
        if _is_long(size) and not long_rows:
            continue
        for contract in op.spec.contracts:
            for backend in chosen:
                if not op.spec.keeps(backend, contract.name):
                    continue
                whole = rows == ROWS[-1] and not _is_long(size)
                every_dtype = whole or (strided and not _is_long(size))
                several = max(len(contract.accepted(a)) for a in op.spec.forward.inputs) if every_dtype else 1
                for dtypes in range(several):
                    count += _run(op, contract, backend, rows, size, strided, device, dtypes, whole)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count


def shapes(spec: OpSpec) -> Iterator[tuple[int, dict[str, int], bool]]:
    """As :func:`_shapes`, with sizes that fit each other."""
    for rows, size, strided in _shapes(spec):
        yield rows, spec.fitted(size), strided


def _shapes(spec: OpSpec) -> Iterator[tuple[int, dict[str, int], bool]]:
    """(rows, axis sizes, strided): every row count at the odd sizes, three rows at the tuned ones, a few very long rows.

    Without a free axis there are only rows to count.
    """
    if not spec.size_limits:
        for rows in ROWS:
            yield rows, {}, False
        yield ROWS[1], {}, True
    tuned = dict(spec.tuned)
    limits = {axis: most for axis, _, most in spec.size_limits}
    for axis, most in limits.items():
        # Beside the other axis a size must be small where it can be, and a tuned one where that is the small one.
        base = {other: min(ODD_SIZES[-1], tuned[other][0], limits[other]) for other in limits if other != axis}
        for size in dict.fromkeys(min(size, most) for size in ODD_SIZES):
            for rows in ROWS:
                yield rows, base | {axis: size}, False
            yield ROWS[1], base | {axis: size}, True
        for size in tuned.get(axis, ()):
            yield ROWS[1], base | {axis: size}, False
        for rows, size, strided in LONG_SIZES:
            if size <= most:
                yield rows, base | {axis: size}, strided


def _run(
    op: Operator,
    declared: Contract,
    backend: str,
    rows: int,
    size: dict[str, int],
    strided: bool,
    device: torch.device,
    dtypes: int,
    whole: bool,
) -> int:
    spec, contract = op.spec, declared.name
    sizes = spec.complete(size)
    results = {f"grad_{r.name}" for r in spec.forward.results}
    drawn: dict[str, Tensor] = {}
    given = [arg for arg in spec.forward.inputs if not arg.derived]
    for arg in (*given, *(a for a in spec.backward.inputs if a.name in results), *spec.beside()):
        accepted = declared.accepted(arg)
        dtype = accepted[min(dtypes, len(accepted) - 1)] if arg in spec.forward.inputs else arg.dtypes[0]
        value = draw(spec, arg, range(rows), sizes, 1, DTYPES[dtype])
        drawn[arg.name] = _offset(value, device) if strided and arg.rows else value.to(device)
    drawn |= derived(spec, spec.forward, drawn, sizes)
    scalars: dict[str, Any] = {s.name: s.default for s in spec.scalars}
    forward = [drawn[arg.name] for arg in spec.forward.inputs]
    count = 0
    saved: tuple[Tensor, ...] = ()
    for plan in range(_plans(op, False, forward, contract, backend)):
        with dispatch.force_plan(plan), torch.no_grad():
            saved = op.forward(*forward, contract=contract, backend=backend, **scalars)
        count += 1
    known = drawn | {r.name: value for r, value in zip(spec.forward.results, saved, strict=True)}
    for change in _changes(spec)[: None if whole else 1]:
        backward = [None if a.name in change.absent else _of_kind(spec, a, known, change) for a in spec.backward.inputs]
        for plan in range(_plans(op, True, backward, contract, backend)):
            with dispatch.force_plan(plan), torch.no_grad():
                op.backward(
                    *backward,
                    contract=contract,
                    backend=backend,
                    grad_dtype=_grad_dtype(spec, known, change.grad_dtype),
                    wanted=change.wanted,
                    **scalars,
                )
            count += 1
    return count


def _of_kind(spec: OpSpec, arg: TensorArg, known: dict[str, Tensor], change: _Change) -> Tensor:
    """An input of the backward in the dtype of the change, or in that of the saved tensors it must agree with."""
    kin = [name for name in spec.backward.kin(arg.name) if not name.startswith("grad_")]
    if kin and arg.name not in kin:
        return known[arg.name].to(known[kin[0]].dtype)
    return known[arg.name].to(change.upstream.get(arg.name, known[arg.name].dtype))


def _grad_dtype(spec: OpSpec, known: dict[str, Tensor], asked: torch.dtype) -> torch.dtype:
    """The asked dtype, or the leaf's own where the narrow one that is asked for is another."""
    if asked == torch.float32:
        return asked
    possible = spec.gradient_dtypes_of({name: dtype_name(tensor.dtype) for name, tensor in known.items()})
    return DTYPES[possible[-1]]


def _is_long(size: dict[str, int]) -> bool:
    return max(size.values(), default=0) >= LONG


def _offset(value: Tensor, device: torch.device) -> Tensor:
    wide = torch.zeros(*value.shape[:-1], value.shape[-1] + OFFSET, dtype=value.dtype)
    wide[..., OFFSET:] = value
    return wide.to(device)[..., OFFSET:]


def _plans(op: Operator, backward: bool, tensors: Sequence[Tensor | None], contract: str, backend: str) -> int:
    scalars = [s.default for s in op.spec.scalars]
    ready = op.prepare(backward, tensors, scalars, contract, backend)
    return len(op.backend(backend).plans(ready.call))


@dataclass(frozen=True)
class _Change:
    """One kind of backward call."""

    upstream: dict[str, torch.dtype]
    absent: tuple[str, ...]
    grad_dtype: torch.dtype
    wanted: list[bool]


def _changes(spec: OpSpec) -> list[_Change]:
    """Everything given and wanted in FP32 first, then what differs from that in one thing, and everything in BF16."""
    upstreams, absences, subsets = _upstream_dtypes(spec), _absent(spec), _wanted(spec)
    plain = _Change(upstreams[0], absences[0], torch.float32, subsets[0])
    return [
        plain,
        *(replace(plain, upstream=upstream) for upstream in upstreams[1:]),
        *(replace(plain, absent=absent) for absent in absences[1:]),
        *(replace(plain, wanted=wanted) for wanted in subsets[1:]),
        replace(plain, grad_dtype=torch.bfloat16),
        *(replace(plain, upstream=upstream, grad_dtype=torch.bfloat16) for upstream in upstreams[1:]),
    ]


def _upstream_dtypes(spec: OpSpec) -> list[dict[str, torch.dtype]]:
    """Each accepted dtype of the upstream gradients; an input that takes one only keeps it."""
    most = max(len(a.dtypes) for a in spec.backward.inputs)
    gradients = [a for a in spec.backward.inputs if a.name.startswith("grad_")]
    return [{a.name: DTYPES[a.dtypes[min(index, len(a.dtypes) - 1)]] for a in gradients} for index in range(most)]


def _absent(spec: OpSpec) -> list[tuple[str, ...]]:
    """Every optional input given, then each left out, the starts of folds together."""
    names = [a.name for a in spec.backward.inputs if a.optional]
    starts = tuple(name for name in names if name.startswith("start_"))
    return [(), *((name,) for name in names if name not in starts), *([starts] if starts else [])]


def _wanted(spec: OpSpec) -> list[list[bool]]:
    """All results together, then each alone."""
    count = len(spec.backward.results)
    alone = [[index == only for index in range(count)] for only in range(count)]
    return [[True] * count, *(alone if count > 1 else [])]


def exercise_on(name: str, device: str, long_rows: bool) -> int:
    """As a process of its own, for a memory checker."""
    backends, place = ("reference",) if device == "cpu" else None, torch.device(device)
    if name in catalogue.of_sequences():
        count = catalogue.part(name, "exercise").exercise(place, backends)
    else:
        count = exercise(name, place, backends, long_rows)
    print(f"{name}: {count} calls", flush=True)
    return 0
