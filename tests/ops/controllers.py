"""What the tests of the operators around a controller share: mhc_pre, mhc_pre_norm and hyper_head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from samebits import registry
from samebits.exact.compare import first_difference
from samebits.verify import conformance
from samebits.verify.operators import draw

CONTRACTS = ("ascending", "ascending-dsv4", "fast", "fast-dsv4")
Tensors = dict[str, Tensor]


class Conformance(conformance.Conformance):
    """Fewer sizes than usual: a reference takes a call for each of 4 D additions, or a model of the tensor core."""

    width = 40
    standing = ("ascending", "fast")
    batch_sizes: ClassVar = ((0, 1, 33, 133), (0, 1, 7))
    odd_widths: ClassVar = ((1, 17, 136), (1, 17, 40))
    wide_patterns: ClassVar = (("normal", "cancelling"), ())
    very_wide_widths: ClassVar = ((4097, 16384), ())
    accuracy_widths: ClassVar = ((1, 17, 40, 1000), (1, 40))
    cpu_patterns: ClassVar = ("normal", "nan", "subnormal")

    def _target_values(self, metafunc: pytest.Metafunc) -> Iterator[Any]:
        """On a CPU a wide row of the reference is that of its parts, whose own tests fold it; a GPU has launches to try."""
        launches = ("test_bits_of_wide_rows", "test_bits_of_very_wide_rows", "test_very_many_rows")
        about_launches = metafunc.function.__name__ in launches
        for target in super()._target_values(metafunc):
            if not (about_launches and target.values[0].device == "cpu"):
                yield target


def drawn(op: str, rows: int, width: int) -> Tensors:
    """Forward inputs and everything that only a backward takes: upstream gradients, further legs, starts of folds."""
    spec = registry.spec(op)
    sizes = spec.complete({"D": width})
    backward = [arg for arg in spec.backward.inputs if arg.name.startswith(("grad_", "start_"))]
    return {arg.name: draw(spec, arg, range(rows), sizes, 0) for arg in (*spec.forward.inputs, *backward)}


def forward(op: str, given: Tensors, contract: str, **scalars: float) -> Tensors:
    """All results by name, saved ones too."""
    spec = registry.spec(op)
    results = registry.operator(op).forward(*(given[a.name] for a in spec.forward.inputs), contract=contract, **scalars)
    return {declared.name: value for declared, value in zip(spec.forward.results, results, strict=True)}


def backward(op: str, known: Tensors, contract: str, **options: Any) -> Tensors:
    """The wanted gradients by name; an input that is not ``known`` is absent."""
    spec = registry.spec(op)
    grads = registry.operator(op).backward(
        *(known.get(arg.name) for arg in spec.backward.inputs), contract=contract, **options
    )
    named = zip(spec.backward.results, grads, strict=True)
    return {declared.name: value for declared, value in named if value is not None}


def rows_of(op: str, tensors: Tensors, chosen: slice | list[int]) -> Tensors:
    """Some of the rows, and the same shared tensors."""
    return {name: value[chosen] if _has_rows(op, name) else value for name, value in tensors.items()}


def padded(op: str, tensors: Tensors, place: int) -> Tensors:
    """With one more row, of zeros, at ``place``."""
    wider = dict(tensors)
    for name, value in tensors.items():
        if _has_rows(op, name):
            wider[name] = torch.cat([value[:place], torch.zeros_like(value[:1]), value[place:]])
    return wider


def _has_rows(op: str, name: str) -> bool:
    spec = registry.spec(op)
    declared = (*spec.forward.inputs, *spec.forward.results, *spec.backward.inputs)
    return next(part.rows for part in declared if part.name == name)


def assert_same(expected: Tensor, found: Tensor, what: str = "") -> None:
    difference = first_difference(expected, found)
    assert difference is None, f"{what}: {difference}"


def assert_padding_adds_nothing(op: str, contract: str) -> None:
    """A row of zeros with upstream gradients of zeros. The published formula has 0 * (x / 0) there, which is NaN.

    Under ``fast`` only behind the others: elsewhere the rows behind it would change their places in a chain.
    """
    given = {name: value for name, value in drawn(op, 5, 24).items() if not name.startswith("start_")}
    expected = backward(op, given | forward(op, given, contract), contract)
    for place in (5,) if contract.startswith("fast") else (0, 3, 5):
        wider = padded(op, given, place)
        found = backward(op, wider | forward(op, wider, contract), contract)
        assert not found["grad_residual"][place].any()
        found["grad_residual"] = found["grad_residual"][[t for t in range(6) if t != place]]
        for name, value in expected.items():
            assert_same(value, found[name], f"{name}, zeros in row {place}")


def assert_batches_continue(op: str, contract: str) -> None:
    """Micro-batches that hand on their parameter gradients give the bytes of one batch; under fast, of 256 rows each."""
    first, rows = (256, 261) if contract.startswith("fast") else (3, 8)
    given = {name: value for name, value in drawn(op, rows, 3).items() if not name.startswith("start_")}
    known = given | forward(op, given, contract)
    expected = backward(op, known, contract)
    head = backward(op, rows_of(op, known, slice(0, first)), contract)
    starts = {name.replace("grad_", "start_"): value for name, value in head.items() if name != "grad_residual"}
    tail = backward(op, rows_of(op, known, slice(first, rows)) | starts, contract)
    tail["grad_residual"] = torch.cat([head["grad_residual"], tail["grad_residual"]])
    for name, value in expected.items():
        assert_same(value, tail[name], name)


def assert_frozen_controller(op: str, contract: str) -> None:
    """Without gradients of the controller, that of the streams keeps both legs, in the same bits."""
    given = drawn(op, 5, 24)
    known = given | forward(op, given, contract)
    full = backward(op, known, contract)
    frozen = backward(op, known, contract, wanted=[name == "grad_residual" for name in full])
    assert frozen.keys() == {"grad_residual"}
    assert_same(full["grad_residual"], frozen["grad_residual"])
