"""What is measured: a shape of an operator in one direction, and the sweep of them. Reads declarations only, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from samebits.contract import OpSpec, Pass, Result, TensorArg

Direction = Literal["fwd", "bwd", "fwd+bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")
ROWS = (1, 8, 128, 1024, 4096, 8192, 32768, 65536, 131072)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


@dataclass(frozen=True)
class Case:
    """One shape in one direction: what the candidates and the peers of one measurement share.

    ``grads`` says in which dtype gradients travel: ``model``, as autograd passes them (the dtype of the tensor they
    belong to), or ``float32``, as a composite operator keeps them until its legs are merged.
    """

    op: str
    direction: Direction
    rows: int
    sizes: tuple[tuple[str, int], ...]
    grads: Literal["model", "float32"] = "model"

    @property
    def title(self) -> str:
        axes = "".join(f", {axis}={size}" for axis, size in self.sizes)
        return f"{self.op} {self.direction} T={self.rows}{axes}" + (
            ", FP32 gradients" if self.grads == "float32" else ""
        )

    def shape(self) -> dict[str, int]:
        return {"T": self.rows, **dict(self.sizes)}

    def extent(self, spec: OpSpec, part: TensorArg | Result) -> tuple[int, ...]:
        """The shape of one tensor of this case."""
        sizes = spec.complete(dict(self.sizes))
        return (*((self.rows,) if part.rows else ()), *(sizes[axis] for axis in part.axes))


def forms(spec: OpSpec, case: Case) -> tuple[Case, ...]:
    """The case, and a backward with FP32 gradients too where that is another one."""
    wide = replace(case, grads="float32")
    return (case, wide) if case.direction == "bwd" and traffic(spec, wide) != traffic(spec, case) else (case,)


def width(spec: OpSpec) -> str:
    """The dtype that says how wide its rows are: the first 16-bit one among what it is measured with, or float32."""
    firsts = (arg.dtypes[0] for arg in spec.forward.inputs)
    return next((dtype for dtype in firsts if dtype in ("bfloat16", "float16")), "float32")


def upstream_dtype(spec: OpSpec, case: Case, arg: TensorArg) -> str:
    """The dtype of one backward input."""
    if not arg.name.startswith("grad_"):
        return arg.dtypes[0]
    if case.grads == "float32" and len(spec.backward.kin(arg.name)) == 1:
        return "float32" if "float32" in arg.dtypes else arg.dtypes[0]
    return result_dtype(spec.forward, spec.forward.result(arg.name.removeprefix("grad_")))


def result_dtype(direction: Pass, result: Result) -> str:
    """The dtype of a result that is not a gradient, where every input has the first of its dtypes."""
    return next((arg.dtypes[0] for arg in direction.inputs if arg.name == result.dtype), result.dtype)


def gradient_dtype(spec: OpSpec, case: Case) -> str:
    """The ``grad_dtype`` of the explicit backward."""
    if case.grads == "float32":
        return "float32"
    leaves = (r.name.removeprefix("grad_") for r in spec.backward.results if r.dtype == "grad")
    return next((spec.forward.input(name).dtypes[0] for name in leaves), "float32")


def traffic(spec: OpSpec, case: Case) -> int:
    """Bytes of each input read once and each output written once, saved results included: the least any kernel moves."""
    forward = case.direction != "bwd"
    backward = case.direction != "fwd"
    return (forward and _bytes(spec, case, spec.forward)) + (backward and _bytes(spec, case, spec.backward))


def output_bytes(spec: OpSpec, case: Case) -> int:
    chosen = [spec.forward] * (case.direction != "bwd") + [spec.backward] * (case.direction != "fwd")
    return sum(_result_bytes(spec, case, direction) for direction in chosen)


def _bytes(spec: OpSpec, case: Case, direction: Pass) -> int:
    given = [arg for arg in direction.inputs if arg not in spec.beside() and not arg.derived]
    read = sum(_size(case.extent(spec, arg)) * ITEMSIZE[upstream_dtype(spec, case, arg)] for arg in given)
    return read + _result_bytes(spec, case, direction)


def _result_bytes(spec: OpSpec, case: Case, direction: Pass) -> int:
    kept = gradient_dtype(spec, case)
    return sum(
        _size(case.extent(spec, r)) * ITEMSIZE[kept if r.dtype == "grad" else _own_dtype(spec, case, direction, r)]
        for r in direction.results
    )


def _own_dtype(spec: OpSpec, case: Case, direction: Pass, result: Result) -> str:
    """The dtype of a result, which is that of an input in this case where the declaration says so."""
    named = next((arg for arg in direction.inputs if arg.name == result.dtype), None)
    return result.dtype if named is None else upstream_dtype(spec, case, named)


def _size(extent: Iterable[int]) -> int:
    total = 1
    for size in extent:
        total *= size
    return total


def sweep(
    spec: OpSpec,
    rows: Sequence[int] = ROWS,
    sizes: dict[str, int] | None = None,
    directions: Sequence[Direction] = DIRECTIONS,
) -> tuple[Case, ...]:
    """Every combination of rows, tuned sizes (or the given ones) and directions.

    The FP32-gradient form of a backward is a case of its own where the operator can return FP32 gradients.
    """
    given = sizes or {}
    choices = [
        [(axis, given[axis])] if axis in given else [(axis, size) for size in tuned] for axis, tuned in spec.tuned
    ]
    cases: list[Case] = []
    for combination in itertools.product(*choices):
        for direction in directions:
            for count in rows:
                cases += forms(spec, Case(spec.name, direction, count, combination))
    return tuple(cases)
