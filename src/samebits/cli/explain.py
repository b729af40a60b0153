"""``samebits explain``: what would run, decided without a tensor and without that GPU."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits import catalogue, registry
from samebits.catalogue import Declared
from samebits.cli import arguments
from samebits.cli.errors import UserError
from samebits.contract import Contract, OpSpec, Result, TensorArg
from samebits.sequence_ops.declaration import TensorSpec

if TYPE_CHECKING:
    from samebits.dispatch import DeviceInfo


def explain(
    operator: Annotated[str, typer.Argument(help="Operator name, see `samebits list`.")],
    rows: Annotated[int, typer.Option(help="Rows T of the batch; queries of a sequence.")] = 128,
    size: Annotated[
        list[str] | None, typer.Option(help="Size of an axis, e.g. D=4096; default: the first tuned size.")
    ] = None,
    backward: Annotated[bool, typer.Option(help="Explain the backward pass.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Operators of sequences: the causal call.")] = False,
    contract: Annotated[str | None, typer.Option(help="Contract; default: the published one.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for one backend, as the keyword does.")] = None,
    arch: Annotated[str, typer.Option(help="h200 or cpu: where the call would run.")] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Which backend and launch plan a call would take and why, then the contract's reduction orders and rounding points."""
    from samebits.cli import output

    spec = catalogue.declared(operator)
    chosen = spec.contract(contract)
    sizes = arguments.sizes(size or [])
    if operator in catalogue.of_sequences():
        where = _device(rows, arch)
        given = (rows, sizes, backward, causal, chosen.name, backend, where)
        decision, plans = catalogue.part(operator, "explanation").of_sizes(*given)
        call, choice = decision.call, decision.choice
    else:
        if causal:
            raise UserError(f"--causal: {operator} is an operator of rows, which have no order")
        call = build_call(registry.spec(operator), rows, sizes, backward, chosen.name, arch)
        choice, plans = _choose(registry.spec(operator), call, backend)
    if as_json:
        output.print_json(_facts(spec, chosen, call, choice, plans))
        return
    console = output.console()
    axes = ", ".join(f"{axis}={value}" for axis, value in call.sizes)
    title = f"T={rows}, {axes}  contract {chosen.name!r}  on {call.device.name or 'cpu'}"
    console.print(f"[bold]{operator}{'_backward' if backward else ''}  {title}[/bold]")
    _print_choice(choice, plans, console)
    _print_contract(spec, chosen, backward, console)


def build_call(spec: OpSpec, rows: int, sizes: dict[str, int], backward: bool, contract: str, arch: str) -> Any:
    """The ``dispatch.Call`` of dense, aligned inputs of the given shape."""
    from samebits.dispatch import Call
    from samebits.runtime.sweep import dense_layout

    where = _device(rows, arch)
    known = complete_sizes(spec, sizes)
    direction = spec.direction(backward)
    layouts = tuple((arg.name, dense_layout(arg, arg.dtypes[0], known)) for arg in direction.inputs)
    return Call(
        op=spec.name,
        backward=backward,
        contract=contract,
        rows=rows,
        sizes=tuple(known.items()),
        layouts=layouts,
        wanted=tuple(result.name for result in direction.results),
        grad_dtype="float32",
        device=where,
    )


def _device(rows: int, arch: str) -> DeviceInfo:
    from samebits.dispatch import DeviceInfo
    from samebits.runtime import device

    if rows < 0:
        raise UserError(f"--rows {rows}: expected a number of at least 0")
    devices = {"h200": device.H200, "cpu": DeviceInfo("cpu")}
    if arch not in devices:
        raise UserError(f"--arch {arch!r}: expected one of {', '.join(devices)}")
    return devices[arch]


def complete_sizes(spec: OpSpec, given: dict[str, int]) -> dict[str, int]:
    """Every axis of the operator: fixed, given, or the first tuned size."""
    known = dict(spec.fixed_sizes) | {axis: values[0] for axis, values in spec.tuned}
    limits = {axis: (least, most) for axis, least, most in spec.size_limits}
    for axis, value in given.items():
        if axis not in known and axis not in limits:
            raise UserError(
                f"--size {axis}={value}: {spec.name} has no axis {axis!r}; its axes are {', '.join({**known, **limits})}"
            )
        if axis in dict(spec.fixed_sizes) and value != known[axis]:
            raise UserError(f"--size {axis}={value}: {spec.name} fixes {axis} = {known[axis]}")
        if axis in limits and not limits[axis][0] <= value <= limits[axis][1]:
            raise UserError(f"--size {axis}={value}: outside {limits[axis][0]} .. {limits[axis][1]}")
        known[axis] = value
    return spec.complete(known)


def _choose(spec: OpSpec, call: Any, asked: str | None) -> tuple[Any, dict[str, tuple[object, ...]]]:
    """The choice, and the plans of every backend that accepts the call."""
    from samebits import dispatch

    plans: dict[str, tuple[object, ...]] = {}
    trouble: dict[str, str | None] = {}
    for declared in spec.backends:
        if dispatch.refusal(spec, declared.name, call.device, {}, call.contract) is not None:
            continue
        try:
            plans[declared.name] = tuple(
                importlib.import_module(f"samebits.ops.{spec.name}.{declared.name}").plans(call)
            )
        except ImportError as error:
            from samebits.runtime.device import missing

            trouble[declared.name] = missing(declared.name) or f"its plans cannot be read here: {error}"
    return dispatch.choose(spec, call, asked, trouble, plans), plans


def _facts(
    spec: Declared, contract: Contract, call: Any, choice: Any, plans: dict[str, tuple[object, ...]]
) -> dict[str, Any]:
    names = _names(spec, call.backward)
    return {
        "operator": spec.name,
        "direction": "backward" if call.backward else "forward",
        "shape": {"T": call.rows, **dict(call.sizes)},
        "device": call.device.name or call.device.kind,
        "backend": choice.backend,
        "reason": choice.reason,
        "rejected": list(choice.rejected),
        "plans": [describe_plan(plan) for plan in plans.get(choice.backend, (choice.plan,))],
        "contract": {
            **{name: getattr(contract, name) for name in ("name", "summary", "exactness", "accumulate", "fma")},
            "approximate": list(contract.approximate),
            "reductions": [dataclasses.asdict(r) for r in contract.reductions if r.result in names],
            "edges": list(spec.edges),
            "rounding": [point for point in contract.rounding if point.partition(":")[0] in names],
        },
    }


def _print_choice(choice: Any, plans: dict[str, tuple[object, ...]], console: Any) -> None:
    console.print(f"backend  [green]{choice.backend}[/green]  ({choice.reason})")
    for why in choice.rejected:
        console.print(f"  passed over: {why}")
    options = plans.get(choice.backend, (choice.plan,))
    for index, plan in enumerate(options):
        marker = "plan     " if index == 0 else "     or  "
        console.print(f"{marker}{describe_plan(plan)}", highlight=False)
    if len(options) > 1:
        console.print(
            f"         all {len(options)} plans give the same bits; the first runs, force_plan(i) runs another"
        )


def describe_plan(plan: object) -> str:
    """The fields of a plan, launch geometry first."""
    if plan is None:
        return "no launch configuration: plain PyTorch code"
    if isinstance(plan, tuple):
        return "; then ".join(describe_plan(step) for step in plan)
    if not dataclasses.is_dataclass(plan) or type(plan).__str__ is not object.__str__:
        return str(plan)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    first = [name for name in ("grid", "block", "shared", "shared_bytes", "num_warps") if name in fields]
    return ", ".join(f"{name}={fields[name]}" for name in [*first, *(name for name in fields if name not in first)])


def _names(spec: Declared, backward: bool) -> set[str]:
    """Everything of one direction that the contract may speak of."""
    if isinstance(spec, OpSpec):
        return {result.name for result in spec.direction(backward).results}
    return spec.direction(backward).names()


def _print_contract(spec: Declared, contract: Contract, backward: bool, console: Any) -> None:
    names = _names(spec, backward)
    console.print(f"\n[bold]contract {contract.name}[/bold]  {contract.summary}")
    fma = "never fused" if contract.fma == "forbid" else "fused only where written"
    console.print(
        f"exactness {contract.exactness}; accumulation in {contract.accumulate}; multiply-adds {fma}", highlight=False
    )
    direction = spec.direction(backward)
    for title, tensors in (("takes", direction.inputs), ("gives", direction.results)):
        console.print(title)
        for tensor in tensors:
            if isinstance(tensor, TensorSpec):
                shape, kinds = tensor.shape, " or ".join(tensor.dtypes)
            else:
                shape = f"({', '.join([*(['T'] if tensor.rows else []), *tensor.axes])})"
                kinds = " or ".join(tensor.dtypes if isinstance(tensor, TensorArg) else (tensor.dtype,))
                kinds = kinds.replace("grad", "float32 or bfloat16, as asked")
                if isinstance(tensor, Result) and tensor.wide:
                    kinds += " or float32, as asked"
            console.print(f"  {tensor.name} {shape} {kinds}  {tensor.doc}", highlight=False, markup=False)
    if contract.approximate:
        console.print(f"approximate instructions: {', '.join(contract.approximate)}", highlight=False)
    console.print("reduction orders")
    for reduction in contract.reductions:
        if reduction.result in names:
            console.print(
                f"  {reduction.result} over {reduction.over}: {reduction.order}", highlight=False, markup=False
            )
    console.print("rounding points")
    for point in contract.rounding:
        if point.partition(":")[0] in names:
            console.print(f"  {point}", highlight=False, markup=False)
    console.print("at the edges")
    for edge in spec.edges:
        console.print(f"  {edge}", highlight=False, markup=False)
