"""The CUDA kernels of every operator on the CPU, bit for bit the reference: a sample that changes with the sources.

All of it: ``python -m samebits.emulate``.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import pytest
from ops import segment_faults

from samebits import registry
from samebits.contract import OpSpec
from samebits.dispatch import Call
from samebits.emulate import cases, judge
from samebits.emulate.cases import Case
from samebits.emulate.launch import Emulator, KernelFault
from samebits.runtime.device import H200
from samebits.runtime.sweep import dense_layout

PLANNED, KERNELS, CALLS = 600, 4, 16
"""Of an operator: calls that are planned; of these the builds and calls that run."""
MOST = 100_000
"""Work of a call."""
VARIED = (("window", "wide"), ("steps", "cancelling"), ("misaligned", "tiny"), ("", "nan"), ("", "huge"))
"""Layouts, each with another pattern of values."""

OPERATORS = [name for name in registry.names() if any(b.name == "cuda" for b in registry.spec(name).backends)]


@functools.cache
def sample(op: str) -> tuple[Case, ...]:
    planned = cases.candidates(registry.spec(op), most=MOST, among=PLANNED)
    found = cases.sampled(cases.chosen(planned), KERNELS, CALLS)
    own = {file.name for file in (files("samebits") / "ops" / op).iterdir() if file.name.endswith(".cu")}
    own -= {f"{entry}.cu" for entry in cases.gpu_only(registry.spec(op))}
    assert own <= {f"{kernel.entry}.cu" for case in found for kernel in case.kernels}, "a kernel that no call runs"
    return tuple(found)


@pytest.mark.parametrize("op", OPERATORS)
def test_bits_are_those_of_the_reference(op: str) -> None:
    found = [str(finding) for case in sample(op) for finding in judge.findings(case)]
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("op", OPERATORS)
def test_bits_with_other_layouts_and_values(op: str) -> None:
    by_form = {case.call.backward: case for case in sample(op)}
    found = [
        f"{layout} {pattern}: {finding}"
        for case in by_form.values()
        for layout, pattern in VARIED
        for finding in judge.findings(case, layout=layout, pattern=pattern)
    ]
    assert not found, "\n".join(found[:5])


def segmented() -> list[OpSpec]:
    """Operators whose kernels go by sorted positions."""
    specs = [registry.spec(op) for op in OPERATORS]
    return [s for s in specs if {"order", "bounds"} <= {arg.name for arg in s.backward.inputs}]


@pytest.mark.parametrize("fault", segment_faults.FAULTS)
@pytest.mark.parametrize("op", [spec.name for spec in segmented()])
def test_sorted_positions_that_are_not_those_of_the_index_are_refused(op: str, fault: str) -> None:
    subject = backward_of_700_positions(op)
    subject.inputs.update(zip(("index", "order", "bounds"), segment_faults.broken(fault), strict=True))
    with pytest.raises(KernelFault, match="samebits: "):
        subject.emulated(subject.plans()[0], Emulator())


def backward_of_700_positions(op: str) -> judge.Subject:
    """With everything given and wanted, in three rows of a table."""
    spec = registry.spec(op)
    sizes = spec.complete({axis: 3 if axis == "R" else 8 for axis, _, _ in spec.size_limits})
    layouts = tuple((arg.name, dense_layout(arg, arg.dtypes[0], sizes)) for arg in spec.backward.inputs)
    wanted = tuple(result.name for result in spec.backward.results)
    call = Call(op, True, spec.contracts[0].name, 700, tuple(sizes.items()), layouts, wanted, "float32", H200)
    return judge.Subject(call, cases.inputs(call))
