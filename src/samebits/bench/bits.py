"""Were the bits of what was timed the contract's? A few rows, run alone through the reference on the same device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.bench.case import Case, gradient_dtype
from samebits.bench.work import Given, backward_tensors, default_scalars
from samebits.checks import DTYPES
from samebits.exact.compare import first_difference
from samebits.operator import Operator
from samebits.verify.operators import derived

EDGE_ROWS = 4
FOLD_ROWS = 131072
"""Up to here a parameter gradient is compared too: its reference folds row by row, a kernel launch each."""
FOLD_COPIES = 8
"""FP32 tensors of the size of a row input that the reference of a parameter gradient holds at once, at most."""


@dataclass(frozen=True)
class Bits:
    ok: bool
    scope: str
    """What was compared, and the first difference if there is one."""


@dataclass(frozen=True)
class Expected:
    """The reference's results for one contract: the chosen rows of row results, and whole parameter gradients."""

    rows: tuple[int, ...]
    results: dict[str, Tensor]
    left_out: tuple[str, ...]
    """Parameter gradients that were too large to fold."""


def chosen_rows(count: int) -> tuple[int, ...]:
    """First, middle and last rows, each once."""
    edge = range(min(EDGE_ROWS, count))
    middle = range(max(0, count // 2 - EDGE_ROWS // 2), min(count, count // 2 + EDGE_ROWS // 2))
    last = range(max(0, count - EDGE_ROWS), count)
    return tuple(sorted({*edge, *middle, *last}))


def expected(op: Operator, case: Case, given: Given, contract: str, free_bytes: int) -> Expected:
    """What the reference says. The rows are taken out of the batch first, so a dependence on the batch shows."""
    spec = op.spec
    rows = chosen_rows(case.rows)
    index = torch.tensor(rows, device=next(iter(given.inputs.values())).device)
    taken = _take(given.inputs, op, index)
    taken |= derived(spec, spec.forward, taken, spec.complete(dict(case.sizes)))
    small = Given(taken, _take(given.upstream, op, index))
    results: dict[str, Tensor] = {}
    left_out: tuple[str, ...] = ()
    with torch.no_grad():
        forward = _forward(op, small, contract)
        if case.direction != "bwd":
            results |= {r.name: value for r, value in zip(spec.forward.results, forward, strict=True)}
        if case.direction != "fwd":
            per_row = [r.rows for r in spec.backward.results]
            results |= _backward(op, case, small, forward, contract, per_row)
            if not all(per_row):
                fold = [not r.rows for r in spec.backward.results]
                if _foldable(case, given, free_bytes):
                    saved = _forward(op, given, contract) if _reads_results(op) else forward
                    results |= _backward(op, case, given, saved, contract, fold)
                else:
                    left_out = tuple(r.name for r in spec.backward.results if not r.rows)
    return Expected(rows, results, left_out)


def compare(op: Operator, case: Case, outputs: tuple[Tensor, ...], truth: Expected) -> Bits:
    """``outputs`` in the order of the declaration: forward results, then gradients, as far as the direction has them."""
    spec = op.spec
    declared = [
        *(spec.forward.results if case.direction != "bwd" else ()),
        *(spec.backward.results if case.direction != "fwd" else ()),
    ]
    compared = []
    for result, output in zip(declared, outputs, strict=True):
        if result.name in truth.left_out:
            continue
        index = torch.tensor(truth.rows, device=output.device)
        found = output.index_select(0, index) if result.rows else output
        exact = truth.results[result.name]
        if case.direction == "fwd+bwd" and result.dtype == "float32" and result.name.startswith("grad_"):
            exact = exact.to(found.dtype)  # autograd rounds it once where the leaf is narrower
        difference = first_difference(found, exact)
        if difference is not None:
            where = f"row {truth.rows[difference.row]} of the batch: " if result.rows else ""
            return Bits(False, f"{result.name} differs: {where}{difference}")
        compared.append(result.name)
    scope = f"{len(truth.rows)} of {case.rows} rows: {', '.join(compared)}"
    return Bits(not truth.left_out, scope + (f"; not compared: {', '.join(truth.left_out)}" if truth.left_out else ""))


def _take(tensors: dict[str, Tensor], op: Operator, index: Tensor) -> dict[str, Tensor]:
    by_rows = {arg.name: arg.rows for direction in (op.spec.forward, op.spec.backward) for arg in direction.inputs}
    return {name: t.index_select(0, index) if by_rows[name] else t for name, t in tensors.items()}


def _forward(op: Operator, given: Given, contract: str) -> tuple[Tensor, ...]:
    return op.forward(*given.inputs.values(), contract=contract, backend="reference", **default_scalars(op))


def _reads_results(op: Operator) -> bool:
    """Whether the backward reads what the forward computed: only then is the forward of all rows worth its time."""
    return any(arg.name == result.name for arg in op.spec.backward.inputs for result in op.spec.forward.results)


def _backward(
    op: Operator, case: Case, given: Given, forward: tuple[Tensor, ...], contract: str, wanted: list[bool]
) -> dict[str, Tensor]:
    found = op.backward(
        *backward_tensors(op, given, forward),
        contract=contract,
        backend="reference",
        grad_dtype=DTYPES[gradient_dtype(op.spec, case)],
        wanted=wanted,
        **default_scalars(op),
    )
    named = zip(op.spec.backward.results, found, strict=True)
    return {result.name: value for result, value in named if value is not None}


def _foldable(case: Case, given: Given, free_bytes: int) -> bool:
    largest = max(tensor.numel() for tensor in given.inputs.values()) * 4 * FOLD_COPIES
    return case.rows <= FOLD_ROWS and largest <= free_bytes
