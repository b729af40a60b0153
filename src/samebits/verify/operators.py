"""Subjects that are judged by the contract of a samebits operator: the operator itself, or somebody's callable for it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits import registry
from samebits.checks import DTYPES, dtype_name
from samebits.contract import OpSpec, Pass, TensorArg
from samebits.verify import inputs
from samebits.verify.subject import (
    GARBAGE_ROWS,
    Batch,
    NotRun,
    Pool,
    Subject,
    UsageError,
    everything,
    first_line,
    gradients,
    leaf,
)
from samebits.verify.tolerance import Tolerance, tolerance


def resolve_sizes(spec: OpSpec, given: Mapping[str, int] | None) -> dict[str, int]:
    """A size for every axis: fixed, then given, then the first tuned one, then the least accepted."""
    sizes = {axis: least for axis, least, _ in spec.size_limits}
    sizes |= {axis: values[0] for axis, values in spec.tuned if values}
    known = set(sizes) | {axis for axis, _ in spec.fixed_sizes}
    for axis in given or {}:
        if axis not in known:
            raise UsageError(f"{spec.name} has no axis {axis!r}; its axes: {', '.join(sorted(known))}")
    return spec.complete(sizes | dict(given or {}))


def stream_name(spec: OpSpec, name: str) -> str:
    return f"{spec.name}/{name}"


def tiny_exponents(spec: OpSpec, arg: TensorArg) -> tuple[int, ...]:
    """How small ``tiny`` values of an input are: what ``ops/<op>/cases.py`` says in ``TINY``, else the general scale."""
    cases = importlib.import_module(f"samebits.ops.{spec.name}.cases")
    declared: dict[str, tuple[int, ...]] = getattr(cases, "TINY", {})
    return declared.get(arg.name, inputs.TINY)


def draw(
    spec: OpSpec,
    arg: TensorArg,
    rows: Sequence[int],
    sizes: Mapping[str, int],
    seed: int,
    dtype: torch.dtype | None = None,
    pattern: str = "normal",
) -> Tensor:
    """One declared input on the CPU: rows of the pattern, or the shared tensor."""
    shape = tuple(sizes[axis] for axis in arg.axes)
    dtype = dtype or DTYPES[arg.dtypes[0]]
    if arg.below:
        return inputs.index_tensor(stream_name(spec, arg.name), rows, sizes[arg.below], dtype, seed)
    if arg.rows:
        tiny = tiny_exponents(spec, arg)
        return inputs.row_tensor(stream_name(spec, arg.name), rows, shape, dtype, seed, arg.sample, pattern, tiny)
    return inputs.parameter_tensor(stream_name(spec, arg.name), shape, dtype, seed, arg.sample)


def derived(
    spec: OpSpec, direction: Pass, known: Mapping[str, Tensor | None], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """The derived inputs of a pass, from the other inputs."""
    names = {arg.name for arg in direction.inputs if arg.derived}
    if not names:
        return {}
    cases = importlib.import_module(f"samebits.ops.{spec.name}.cases")
    made: dict[str, Tensor] = cases.derive(spec, known, sizes)
    return {name: value for name, value in made.items() if name in names}


class OperatorSubject(Subject):
    """One contract of an operator on one backend. Gradients come from the explicit backward, row gradients in FP32."""

    def __init__(
        self,
        name: str,
        contract: str | None,
        backend: str | None,
        device: torch.device,
        dtype: torch.dtype | None,
        rows: int,
        seed: int,
        sizes: Mapping[str, int] | None,
        pattern: str = "normal",
    ) -> None:
        self.op = registry.operator(name)
        self.spec = self.op.spec
        self.contract = self.spec.contract(contract).name
        self.backend, self.device, self.rows = backend, device, rows
        self.title = name
        self.judge_note = f"ops/{name}/golden.py (FP64, rounded where the contract rounds)"
        self.chain_rows = self.spec.contract(contract).chain_rows
        self.promises_fold = self.chain_rows == 1
        self.canonical_nans = device.type == "cpu"
        self.scalars: dict[str, Any] = {s.name: s.default for s in self.spec.scalars}
        self.sizes = resolve_sizes(self.spec, sizes)
        self._golden = importlib.import_module(f"samebits.ops.{name}.golden")
        self.dtypes = self._choose_dtypes(dtype)
        self._pools: dict[str, Pool] = {}
        self._shared: dict[str, Tensor] = {}
        for arg in self._drawn_inputs():
            self._draw(arg, seed, pattern)

    def _choose_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        accepted = self.spec.contract(self.contract).accepted
        chosen = {arg.name: DTYPES[accepted(arg)[0]] for arg in self._drawn_inputs()}
        if dtype is None:
            return chosen
        taking = [arg.name for arg in self._drawn_inputs() if dtype_name(dtype) in accepted(arg)]
        if not taking:
            listed = "; ".join(f"{arg.name}: {' or '.join(accepted(arg))}" for arg in self._drawn_inputs())
            raise UsageError(f"no input of {self.spec.name} takes {dtype_name(dtype)} ({listed})")
        return chosen | dict.fromkeys(taking, dtype)

    def _drawn_inputs(self) -> list[TensorArg]:
        """Forward inputs and upstream gradients; everything else in a backward comes from a forward."""
        results = {f"grad_{r.name}" for r in self.spec.forward.results}
        given = [arg for arg in self.spec.forward.inputs if not arg.derived]
        return [*given, *(a for a in self.spec.backward.inputs if a.name in results)]

    def _draw(self, arg: TensorArg, seed: int, pattern: str) -> None:
        dtype = self.dtypes[arg.name]
        if not arg.rows:
            self._shared[arg.name] = draw(self.spec, arg, [], self.sizes, seed, dtype).to(self.device)
            return
        values = draw(self.spec, arg, everything(self.rows), self.sizes, seed, dtype, pattern)
        garbage = range(self.rows, self.rows + GARBAGE_ROWS) if not arg.below else range(0)
        for kind, ids in (("wide", garbage), ("nan", garbage[1::3])):
            for row in ids:
                source = stream_name(self.spec, f"garbage/{arg.name}")
                shape = tuple(values.shape[1:])
                values[row] = inputs.row_tensor(source, [2 * row], shape, dtype, seed, arg.sample, kind)[0]
        self._pools[arg.name] = Pool(values.to(self.device))

    # --- the candidate --------------------------------------------------------------------------------------------

    def batch(self, ids: Sequence[int]) -> Batch:
        taken = {name: pool.take(ids) for name, pool in self._pools.items()}
        names = {arg.name for arg in self.spec.forward.inputs}
        made = derived(self.spec, self.spec.forward, taken | self._shared, self.sizes)
        per_row = {arg.name for arg in self.spec.forward.inputs if arg.rows}
        rows = {name: value for name, value in taken.items() if name in names}
        return Batch(
            ids=tuple(ids),
            rows=rows | {name: value for name, value in made.items() if name in per_row},
            shared=self._shared | {name: value for name, value in made.items() if name not in per_row},
            upstream={name.removeprefix("grad_"): value for name, value in taken.items() if name not in names},
        )

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._forward(batch, self.backend)

    def backward(self, batch: Batch) -> dict[str, Tensor]:
        return self._backward(batch, self.backend, self._forward(batch, self.backend), torch.float32)

    def _forward(self, batch: Batch, backend: str | None) -> dict[str, Tensor]:
        tensors = [batch.tensor(arg.name) for arg in self.spec.forward.inputs]
        results = self.op.forward(*tensors, contract=self.contract, backend=backend, **self.scalars)
        return {r.name: value for r, value in zip(self.spec.forward.results, results, strict=True)}

    def backward_inputs(self, batch: Batch, saved: dict[str, Tensor]) -> list[Tensor]:
        known = {name: batch.tensor(name) for name in (*batch.rows, *batch.shared)} | saved
        known |= {f"grad_{name}": value for name, value in batch.upstream.items()}
        known |= {arg.name: self._zeros(arg, len(batch.ids)) for arg in self.spec.beside()}
        return [known[arg.name] for arg in self.spec.backward.inputs]

    def _zeros(self, arg: TensorArg, rows: int) -> Tensor:
        shape = [self.sizes[axis] for axis in arg.axes]
        return torch.zeros([rows, *shape] if arg.rows else shape, dtype=DTYPES[arg.dtypes[0]], device=self.device)

    def _backward(
        self, batch: Batch, backend: str | None, saved: dict[str, Tensor], grad_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        scalars: dict[str, Any] = dict(self.scalars)
        results = self.op.backward(
            *self.backward_inputs(batch, saved),
            contract=self.contract,
            backend=backend,
            grad_dtype=grad_dtype,
            **scalars,
        )
        named = zip(self.spec.backward.results, results, strict=True)
        return {r.name.removeprefix("grad_"): value for r, value in named if value is not None}

    def is_row(self, name: str, gradient: bool) -> bool:
        return self.spec.backward.result(f"grad_{name}").rows if gradient else self.spec.forward.result(name).rows

    def plans(self, batch: Batch, gradient: bool) -> int:
        tensors = [batch.tensor(arg.name) for arg in self.spec.forward.inputs]
        if gradient:
            tensors = self.backward_inputs(batch, self.forward(batch))
        ready = self.op.prepare(gradient, tensors, list(self.scalars.values()), self.contract, self.backend)
        return len(self.op.backend(ready.choice.backend).plans(ready.call))

    def chosen_backend(self) -> str:
        batch = self.batch(range(min(self.rows, 1)))
        tensors = [batch.tensor(arg.name) for arg in self.spec.forward.inputs]
        return self.op.prepare(False, tensors, list(self.scalars.values()), self.contract, self.backend).choice.backend

    def autograd(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        leaves = {name: leaf(batch.tensor(name)) for name in (*batch.rows, *batch.shared)}
        tensors = [leaves[arg.name] for arg in self.spec.forward.inputs]
        results = self.op.forward(*tensors, contract=self.contract, backend=self.backend, **self.scalars)
        named = {r.name: value for r, value in zip(self.spec.forward.results, results, strict=True)}
        upstream = {name: value.to(named[name].dtype) for name, value in batch.upstream.items()}
        implicit = gradients(named, leaves, upstream)
        edge = Batch(batch.ids, batch.rows, batch.shared, upstream)
        explicit = self._backward(edge, self.backend, self.forward(batch), self.leaf_dtype())
        explicit |= {name: upstream[result] for name, result in self.spec.through}
        return implicit, {name: value.to(leaves[name].dtype) for name, value in explicit.items()}

    def leaf_dtype(self) -> torch.dtype:
        """The dtype of gradients that follow ``grad_dtype``, as autograd asks for it."""
        names = [r.name.removeprefix("grad_") for r in self.spec.backward.results if r.dtype == "grad"]
        return self.dtypes[names[0]] if names else torch.float32

    # --- the judge ------------------------------------------------------------------------------------------------

    def golden(self, batch: Batch, gradient: bool) -> dict[str, Tensor]:
        if not gradient:
            return self.golden_forward(batch, self.scalars)
        known = batch.rows | batch.shared | {f"grad_{name}": value for name, value in batch.upstream.items()}
        stored: tuple[str, ...] = getattr(self._golden, "STORED", ())
        if (
            stored
        ):  # what the model keeps in 16 bits between two steps: a tie rounded the other way is no error of a gradient
            results = self.forward(batch)
            known |= {name: results[name] for name in stored if name in results}  # a callable shows its public ones
        values = self._judged(self._golden.backward, known, self.scalars)
        return {name.removeprefix("grad_"): value for name, value in values.items()}

    def golden_forward(self, batch: Batch, scalars: dict[str, float]) -> dict[str, Tensor]:
        return self._judged(self._golden.forward, batch.rows | batch.shared, scalars)

    def _judged(
        self, function: Callable[..., dict[str, Tensor]], known: dict[str, Tensor], scalars: dict[str, float]
    ) -> dict[str, Tensor]:
        """A golden whose formula depends on the contract takes its name as a third argument."""
        third = (self.contract,) if len(inspect.signature(function).parameters) == 3 else ()
        return dict(function(known, scalars, *third))

    def tolerance(self, name: str, dtype: torch.dtype, gradient: bool) -> Tolerance:
        result = self.spec.direction(gradient).result(f"grad_{name}" if gradient else name)
        axes = [r.over for r in self.spec.contract(self.contract).reductions if r.result == result.name]
        length = max([1, *(self.rows if axis == "T" else self.sizes[axis] for axis in axes)])
        return tolerance(result.tolerance, dtype, gradient, length)

    def reference(self, batch: Batch, gradient: bool) -> dict[str, Tensor] | None:
        saved = self._forward(batch, "reference")
        return self._backward(batch, "reference", saved, torch.float32) if gradient else saved


class CandidateSubject(OperatorSubject):
    """Somebody's callable for an operator, judged by the operator's inputs, golden and, if it claims one, contract."""

    def __init__(self, function: Callable[..., Any], title: str, claims_contract: bool, **options: Any) -> None:
        super().__init__(**options)
        self.function = function
        self.claims_contract = claims_contract
        self.promises_fold = claims_contract and self.chain_rows == 1
        self.title = f"{title} as {self.spec.name}"
        self.public = [r.name for r in self.spec.forward.results if not r.hidden]
        self._keywords = self._accepted_scalars()

    def _choose_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Autograd wants an upstream of the result's own dtype."""
        chosen = super()._choose_dtypes(dtype)
        own = {
            f"grad_{r.name}": DTYPES[r.dtype] if r.dtype in DTYPES else chosen[r.dtype]
            for r in self.spec.forward.results
        }
        return {name: own.get(name, value) for name, value in chosen.items()}

    def _accepted_scalars(self) -> dict[str, float]:
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return {}
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return {name: value for name, value in self.scalars.items() if open_ended or name in parameters}

    def _call(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        given = (leaves[arg.name] for arg in self.spec.forward.inputs if not arg.derived)
        results = self.function(*given, **self._keywords)
        values = [results] if isinstance(results, Tensor) else list(results)
        if len(values) != len(self.public):
            raise UsageError(
                f"{self.title}: expected {len(self.public)} results ({', '.join(self.public)}), got {len(values)}"
            )
        return dict(zip(self.public, values, strict=True))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            return self._call(batch.rows | batch.shared)

    def backward(self, batch: Batch) -> dict[str, Tensor]:
        leaves = {name: leaf(value) for name, value in (batch.rows | batch.shared).items()}
        try:
            results = self._call(leaves)
        except (RuntimeError, NotImplementedError) as error:
            raise NotRun(f"the forward with gradients raised {type(error).__name__}: {first_line(error)}") from error
        return gradients(results, leaves, {n: v for n, v in batch.upstream.items() if n in results})

    def plans(self, batch: Batch, gradient: bool) -> int:
        return 1

    def chosen_backend(self) -> str:
        return "callable"

    def autograd(self, batch: Batch) -> None:
        return None

    def golden(self, batch: Batch, gradient: bool) -> dict[str, Tensor]:
        values = super().golden(batch, gradient)
        return values if gradient else {name: values[name] for name in self.public}

    def reference(self, batch: Batch, gradient: bool) -> dict[str, Tensor] | None:
        if not self.claims_contract:
            return None
        saved = self._forward(batch, "reference")
        if gradient:
            return self._backward(batch, "reference", saved, self.leaf_dtype())
        return {name: saved[name] for name in self.public}
