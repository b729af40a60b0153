"""From a declaration to torch operators: schema, fake kernel, dispatch to a backend.

A call goes: public function -> torch op -> checks -> choice of backend and plan -> launch -> results. The torch op is
opaque, so no compiler can re-order or fuse what is inside, and the same checks run on real and on fake tensors.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits import dispatch, observers
from samebits.autograd import as_tuple, autograd_functions, refuse_inference, refuse_second_derivative, refuse_tangents
from samebits.checks import DTYPES, Request, Shapes, as_rows, check, dtype_name, layout_of, obstacle
from samebits.contract import OpSpec, Pass, Result, TensorArg
from samebits.dispatch import Call, Choice, UnsupportedError
from samebits.observers import unwatched
from samebits.runtime import device as devices
from samebits.runtime.program import Form, Program, dense, form_of, recorded

_STRIDED = torch.strided
LIBRARY = torch.library.Library("samebits", "DEF")
_NOT_THE_CALLER = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class Output(NamedTuple):
    """A result as it is to be made."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    declared: Result
    wanted: bool
    as_rows: tuple[int, ...] | None
    """The shape in which a kernel writes it, where that is another."""


class Given(NamedTuple):
    """An input as a kernel sees it."""

    at: int
    """Its place among the inputs."""
    declared: TensorArg
    seen_as: tuple[int, ...] | bool
    """True for the very tensor that was given, a shape for a view of it, False for what :func:`samebits.checks.as_rows` makes."""


@dataclass(frozen=True)
class Decision:
    """Everything that follows from the metadata of a call. Made once for each, then looked up."""

    call: Call
    choice: Choice
    shapes: Shapes
    reasons: tuple[str | None, ...]
    """For each input why it must be copied, or None."""
    copies: tuple[str, ...]
    """The inputs that no kernel can read in place, with the reason; they are copied to a dense layout, bytes unchanged."""
    given: tuple[Given, ...]
    """The inputs that are there, in their order."""
    outputs: tuple[Output, ...]
    scalars: dict[str, float]
    device: int | None
    """Of the tensors, where they are on a GPU."""
    where: torch.device
    """The device of the tensors."""
    program: Program | None
    """What the backend launches, where it has been written down."""


KNOWN_CALLS = 4096
"""Decisions kept per operator; where shapes never repeat, the oldest are of no use."""


@dataclass(frozen=True)
class Prepared:
    """A call that passed its checks: what would run, on what. Nothing has been copied or launched."""

    decision: Decision
    tensors: tuple[Tensor | None, ...]

    @property
    def call(self) -> Call:
        return self.decision.call

    @property
    def choice(self) -> Choice:
        return self.decision.choice

    @property
    def shapes(self) -> Shapes:
        return self.decision.shapes

    @property
    def copies(self) -> tuple[str, ...]:
        return self.decision.copies

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs as a kernel sees them, copied where they must be."""
        return _as_kernels_see(self.decision, self.tensors)


def _as_kernels_see(decision: Decision, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    found = {}
    for at, arg, seen in decision.given:
        tensor = tensors[at]
        assert tensor is not None
        if seen is True:
            found[arg.name] = tensor
        elif seen is False:
            found[arg.name] = as_rows(arg, tensor, decision.reasons[at])
        else:
            found[arg.name] = tensor.view(seen)
    return found


class Operator:
    """An operator at work. ``forward`` and ``backward`` are torch ops; results come in the order of the declaration."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._backends: dict[str, ModuleType] = {}
        self._scalar_names = frozenset(scalar.name for scalar in spec.scalars)
        self._told: set[tuple[str, ...]] = set()
        self._decisions: dict[tuple[Any, ...], Decision] = {}
        self._forward_op = self._register(backward=False)
        self._backward_op = self._register(backward=True)
        self._function, self._unheard_function = autograd_functions(self)
        LIBRARY.impl(self.name, self._autograd_kernel, "Autograd")
        LIBRARY.impl(f"{self.name}_backward", self._backward_autograd_kernel, "Autograd")

    # --- public entry points --------------------------------------------------------------------------------------

    def forward(
        self,
        *tensors: Tensor | None,
        contract: str | None = None,
        backend: str | None = None,
        out_dtype: torch.dtype | None = None,
        **scalars: float,
    ) -> tuple[Tensor, ...]:
        """All results, saved ones included, through the torch op (differentiable, compilable)."""
        name = self.spec.contract(contract).name
        if torch.compiler.is_compiling() or not unwatched(tensors):
            self._need_tensors(self.spec.forward.inputs, tensors)
            arguments = (*tensors, *self._scalar_values(scalars), name, backend)
            if out_dtype is not None:
                arguments += (dtype_name(out_dtype),)
            return as_tuple(self._forward_op(*arguments))
        values = self._scalar_values(scalars)
        out = None if out_dtype is None else dtype_name(out_dtype)
        refuse_tangents(self.name, tensors)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    refuse_inference(self.spec, tensors)
                    return as_tuple(self._unheard_function.apply((values, name, backend, out), *tensors))
        return self.run(Request(False, tensors, values, name, backend, "float32", None, out))

    def backward(
        self,
        *tensors: Tensor | None,
        contract: str | None = None,
        backend: str | None = None,
        grad_dtype: torch.dtype = torch.float32,
        wanted: Sequence[bool] | None = None,
        **scalars: float,
    ) -> tuple[Tensor | None, ...]:
        """The explicit backward. Row gradients have ``grad_dtype`` where the contract leaves it open; unwanted ones are None."""
        self._need_tensors(self.spec.backward.inputs, tensors)
        mask = [True] * len(self.spec.backward.results) if wanted is None else list(wanted)
        name = self.spec.contract(contract).name
        arguments = (*tensors, *self._scalar_values(scalars), name, backend, dtype_name(grad_dtype), mask)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not unwatched(tensors):
            results = as_tuple(self._backward_op(*arguments))
        else:
            refuse_tangents(f"{self.name}_backward", tensors)
            results = self._launch(True, *arguments)
        return tuple(result if want else None for result, want in zip(results, mask, strict=True))

    def below_autograd(self, backward: bool, *arguments: Any) -> tuple[Tensor, ...]:
        """The results of one direction, in the order of the declaration, for a caller that takes care of the gradient.

        ``arguments`` are those of the torch op. Where nobody watches torch's dispatcher, the call does not go through it.
        """
        count = len(self.spec.direction(backward).inputs)
        if not torch.compiler.is_compiling() and unwatched(arguments[:count]):
            return self._launch(backward, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return as_tuple((self._backward_op if backward else self._forward_op)(*arguments))

    def backend(self, name: str) -> ModuleType:
        """The module of a backend, ``samebits.ops.<op>.<name>``: ``plans(call)`` and ``run(...)``."""
        if name not in self._backends:
            self._backends[name] = importlib.import_module(f"samebits.ops.{self.name}.{name}")
        return self._backends[name]

    # --- preparing a call -----------------------------------------------------------------------------------------

    def prepare(
        self,
        backward: bool,
        tensors: Sequence[Tensor | None],
        scalars: Sequence[float],
        contract: str,
        backend: str | None,
        grad_dtype: str = "float32",
        mask: Sequence[bool] | None = None,
        out_dtype: str | None = None,
    ) -> Prepared:
        """Check a call and decide how it runs, without running it. Raises as :func:`check` and ``dispatch.choose`` do."""
        return self._prepared(Request(backward, tensors, scalars, contract, backend, grad_dtype, mask, out_dtype))

    def _prepared(self, request: Request) -> Prepared:
        return Prepared(self._decision(request), tuple(request.tensors))

    def _decision(self, request: Request) -> Decision:
        return self._known(request)[0]

    def _known(self, request: Request) -> tuple[Decision, list[int]]:
        """What follows from the metadata of a call, and the addresses of its tensors."""
        backward, tensors, scalars, contract, backend, grad_dtype, mask, out_dtype = request
        key: list[Any] = [backward, contract, backend, grad_dtype, out_dtype, None if mask is None else tuple(mask)]
        key += dispatch.forced_plan(), *scalars
        addresses = []
        for t in tensors:
            if t is None:
                key.append(None)
                addresses.append(0)
            elif t.layout is _STRIDED:
                addresses.append(address := t.data_ptr())
                gpu = t.get_device()
                key += t.dtype, t.shape, t.stride(), address % 16, gpu if gpu >= 0 else t.device
            else:
                check(self.spec, request)  # raises: no other layout is accepted
        known = self._decisions.get(found := tuple(key))
        if known is None:
            known = self._decide(request)
            if len(self._decisions) >= KNOWN_CALLS:
                self._decisions.clear()
            self._decisions[found] = known
        return known, addresses

    def _decide(self, request: Request) -> Decision:
        direction, mask = self.spec.direction(request.backward), request.mask
        self._need_tensors(direction.inputs, request.tensors)
        shapes = check(self.spec, request)
        pairs = list(zip(direction.inputs, request.tensors, strict=True))
        given = [(arg, tensor) for arg, tensor in pairs if tensor is not None]
        views = {arg.name: as_rows(arg, tensor, obstacle(arg, tensor)) for arg, tensor in given}
        reasons = tuple(None if tensor is None else obstacle(arg, tensor) for arg, tensor in pairs)
        wanted = tuple(result.name for index, result in enumerate(direction.results) if mask is None or mask[index])
        info = devices.info(given[0][1].device)
        call = Call(
            op=self.name,
            backward=request.backward,
            contract=request.contract,
            rows=shapes.rows,
            sizes=tuple(shapes.sizes.items()),
            layouts=tuple((name, layout_of(view)) for name, view in views.items()),
            wanted=wanted,
            grad_dtype=request.grad_dtype,
            device=info,
            out_dtype=request.out_dtype,
        )
        names = [request.backend] if request.backend is not None else [b.name for b in self.spec.backends]
        installed = {name: devices.missing(name) for name in names}
        plans: dict[str, tuple[object, ...]] = {}
        for name in names:
            if dispatch.refusal(self.spec, name, info, installed, request.contract) is None:
                # A backend's module may refuse more than the declaration says of it: a contract, an architecture.
                why = getattr(self.backend(name), "refuses", lambda call: None)(call)
                if why is None:
                    plans[name] = self.backend(name).plans(call)
                    break
                installed[name] = why
        choice = dispatch.choose(self.spec, call, request.backend, installed, plans)
        copies = tuple(f"{a.name} ({why})" for a, why in zip(direction.inputs, reasons, strict=True) if why)
        inputs = tuple(
            Given(at, arg, _seen_as(tensor, views[arg.name], reasons[at]))
            for at, (arg, tensor) in enumerate(pairs)
            if tensor is not None
        )
        outputs = tuple(
            _output(r, shapes, r.name in wanted, _result_dtype(r, direction, request)) for r in direction.results
        )
        scalars = {s.name: float(v) for s, v in zip(self.spec.scalars, request.scalars, strict=True)}
        here = given[0][1]
        device = here.get_device() if here.is_cuda else None
        known = Decision(call, choice, shapes, reasons, copies, inputs, outputs, scalars, device, here.device, None)
        forms = {name: form_of(view) for name, view in views.items()}
        return replace(known, program=self._program(known, forms))

    def _program(self, decision: Decision, forms: dict[str, Form]) -> Program | None:
        """Of a call that is the kernels of its backend and nothing else. ``forms``: of the inputs as a kernel sees them."""
        call = decision.call
        given = {arg.name: at for at, arg, seen in decision.given if seen is not False}
        if decision.choice.backend != "cuda" or not call.rows or not call.wanted or given.keys() != forms.keys():
            return None
        count = len(self.spec.direction(call.backward).inputs)
        tensors: list[Form | None] = [None] * count
        for name, at in given.items():
            tensors[at] = forms[name]
        tensors += [dense(o.shape if o.as_rows is None else o.as_rows, o.dtype) for o in decision.outputs]
        run = self.backend("cuda").run

        def call_it(made: list[Any]) -> None:
            inputs = {name: made[at] for name, at in given.items()}
            results = {o.declared.name: r for o, r in zip(decision.outputs, made[count:], strict=True) if o.wanted}
            run(call, decision.choice.plan, inputs, results, decision.scalars)

        return recorded(call_it, tensors)

    def _launch(self, backward: bool, *args: Any) -> tuple[Tensor, ...]:
        """The body of both torch ops."""
        return self.run(self._request(backward, args))

    def run(self, request: Request) -> tuple[Tensor, ...]:
        """The results of a call, in the order of the declaration, past torch's dispatcher and without a gradient."""
        decision, addresses = self._known(request)
        if decision.copies or decision.choice.rejected:
            self._enforce_policy(decision, request.backend)
        where = decision.where
        results = [
            torch.empty_strided(shape, strides, dtype=dtype, device=where)
            for shape, strides, dtype, _, _, _ in decision.outputs
        ]
        if decision.device is not None and decision.device != devices.current_device():
            with torch.cuda.device(decision.device):
                self._fill(decision, request, addresses, results)
        else:
            self._fill(decision, request, addresses, results)
        if observers.OBSERVERS:
            observers.tell(self.name, request.backward, request.tensors, results, decision)
        return tuple(results)

    def _fill(self, decision: Decision, request: Request, addresses: list[int], results: list[Tensor]) -> None:
        """Give the results their values, with the device of the tensors current."""
        if decision.program is not None:
            addresses += [result.data_ptr() for result in results]
            decision.program.run(addresses, decision.where)
            return
        call, inputs = decision.call, _as_kernels_see(decision, request.tensors)
        if call.rows == 0:
            for output, result in zip(decision.outputs, results, strict=True):
                start = inputs.get(f"start_{output.declared.name.removeprefix('grad_')}")
                if not output.declared.rows and result.numel():
                    result.zero_() if start is None else torch.add(start, 0.0, out=result)
        elif call.wanted:
            named = {
                declared.name: result if rows is None else result.view(rows)
                for (_, _, _, declared, wanted, rows), result in zip(decision.outputs, results, strict=True)
                if wanted
            }
            self.backend(decision.choice.backend).run(call, decision.choice.plan, inputs, named, decision.scalars)

    def _enforce_policy(self, ready: Decision, asked: str | None) -> None:
        notices: list[tuple[tuple[str, ...], str]] = []
        direction = "backward" if ready.call.backward else "forward"
        if ready.copies:
            names = tuple(copy.split(" ")[0] for copy in ready.copies)
            notices.append(((direction, *names), f"copied to a dense layout: {', '.join(ready.copies)}"))
        if asked is None and dispatch.slower_than_preferred(ready.choice, ready.call):
            why = "; ".join(ready.choice.rejected)
            notices.append(((direction, why), f"running on the slower backend {ready.choice.backend!r}: {why}"))
        announce(self.name, notices, self._told)

    # --- torch registration ---------------------------------------------------------------------------------------

    def _register(self, backward: bool) -> Any:
        qualified = f"{self.name}_backward" if backward else self.name
        LIBRARY.define(qualified + schema(self.spec, backward))

        def run(*args: Any) -> Any:
            results = self._launch(backward, *args)
            return results if len(results) > 1 else results[0]

        def fake(*args: Any) -> Any:
            request = self._request(backward, args)
            direction, shapes, mask = self.spec.direction(backward), check(self.spec, request), request.mask
            like = next(t for t in request.tensors if t is not None)
            results = tuple(
                like.new_empty(
                    shapes.of(result) if mask is None or mask[index] else (0,),
                    dtype=_result_dtype(result, direction, request),
                )
                for index, result in enumerate(direction.results)
            )
            return results if len(results) > 1 else results[0]

        LIBRARY.impl(qualified, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"samebits::{qualified}", fake, lib=LIBRARY)
        return getattr(torch.ops.samebits, qualified).default

    def _request(self, backward: bool, args: tuple[Any, ...]) -> Request:
        count = len(self.spec.direction(backward).inputs)
        end = count + len(self.spec.scalars)
        contract, backend, *rest = args[end:]
        if backward:
            return Request(backward, args[:count], args[count:end], contract, backend, *rest)
        return Request(backward, args[:count], args[count:end], contract, backend, "float32", None, *rest)

    def _autograd_kernel(self, *args: Any) -> Any:
        tensors = args[: len(self.spec.forward.inputs)]
        refuse_tangents(self.name, tensors)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            refuse_inference(self.spec, tensors)
            results = self._function.apply(*args)
            return results if len(self.spec.forward.results) > 1 else results[0]
        with torch._C._AutoDispatchBelowAutograd():
            return self._forward_op(*args)

    def _backward_autograd_kernel(self, *args: Any) -> Any:
        tensors = args[: len(self.spec.backward.inputs)]
        refuse_tangents(f"{self.name}_backward", tensors)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            refuse_second_derivative(f"{self.name}_backward")
        with torch._C._AutoDispatchBelowAutograd():
            return self._backward_op(*args)

    def _scalar_values(self, given: dict[str, float]) -> list[float]:
        if not given and not self.spec.scalars:
            return []
        if not given.keys() <= self._scalar_names:
            unknown = given.keys() - self._scalar_names
            raise TypeError(f"{self.name}: unknown argument {sorted(unknown)[0]!r}")
        values = []
        for scalar in self.spec.scalars:
            value = given.get(scalar.name, scalar.default)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{self.name}: {scalar.name} must be a number, not {value!r}")
            values.append(float(value))
        return values

    def _need_tensors(self, args: tuple[TensorArg, ...], tensors: Sequence[Any]) -> None:
        if len(tensors) != len(args):
            raise TypeError(
                f"{self.name}: expected {len(args)} tensors ({', '.join(a.name for a in args)}), got {len(tensors)}"
            )
        for arg, tensor in zip(args, tensors, strict=True):
            if type(tensor) is Tensor or (tensor is None and arg.optional):
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.name}: {arg.name} must be a torch.Tensor, not {type(tensor).__name__}")


def announce(name: str, notices: Iterable[tuple[tuple[str, ...], str]], told: set[tuple[str, ...]]) -> None:
    """Deal with (cause, notice) as the policy says: a warning where the cause was not ``told`` yet, UnsupportedError, nothing."""
    level = dispatch.strictness()
    for cause, notice in () if level == "silent" else notices:
        if level == "strict":
            raise UnsupportedError(f"{name}: policy 'strict' forbids this call; {notice}")
        if cause not in told:
            told.add(cause)
            text = f"samebits.{name}: {notice} (said once; samebits.policy('strict') refuses it)"
            warnings.warn(text, stacklevel=_levels_to_the_caller())


def explain(operator: str, *tensors: Tensor | None, backward: bool = False, **options: Any) -> Prepared:
    """Which backend and launch plan a call would take, why, and which inputs it would copy. Runs nothing.

    ``options``: ``contract``, ``backend``, the operator's scalars, ``out_dtype`` of a forward that has it, and ``grad_dtype``
    and ``wanted`` of a backward.
    """
    from samebits import registry

    op = registry.operator(operator)
    contract = op.spec.contract(options.pop("contract", None)).name
    backend = options.pop("backend", None)
    grad_dtype = dtype_name(options.pop("grad_dtype", torch.float32))
    wanted = options.pop("wanted", None)
    out_dtype = options.pop("out_dtype", None)
    op._need_tensors(op.spec.direction(backward).inputs, tensors)
    out = None if out_dtype is None else dtype_name(out_dtype)
    return op.prepare(backward, tensors, op._scalar_values(options), contract, backend, grad_dtype, wanted, out)


def schema(spec: OpSpec, backward: bool) -> str:
    """The torch schema of one direction, without the name."""
    direction = spec.direction(backward)
    parts = [f"Tensor{'?' if arg.optional else ''} {arg.name}" for arg in direction.inputs]
    parts += [f"float {scalar.name}" for scalar in spec.scalars]
    parts += ["str contract", "str? backend"]
    if backward:
        parts += ["str grad_dtype", "bool[] wanted"]
    elif direction.wide:
        parts += ["str? out_dtype=None"]
    count = len(direction.results)
    returns = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
    return f"({', '.join(parts)}) -> {returns}"


def _seen_as(given: Tensor, seen: Tensor, why: str | None) -> tuple[int, ...] | bool:
    """What :class:`Decision` keeps of an input: what ``as_rows`` made of it, where a plain view does the same."""
    if seen is given:
        return True
    shape = tuple(seen.shape)
    return shape if why is None and given.view(shape).stride() == seen.stride() else False


def _result_dtype(result: Result, direction: Pass, request: Request) -> torch.dtype:
    if result.dtype == "grad":
        return DTYPES[request.grad_dtype]
    if result.wide and request.out_dtype is not None:
        return DTYPES[request.out_dtype]
    for arg, tensor in zip(direction.inputs, request.tensors, strict=True):
        if arg.name == result.dtype and tensor is not None:
            return tensor.dtype
    return DTYPES[result.dtype]


def _output(declared: Result, shapes: Shapes, wanted: bool, dtype: torch.dtype) -> Output:
    shape, lead = shapes.of(declared), len(shapes.lead)
    rows = (shapes.rows, *shape[lead:]) if declared.rows and lead != 1 else None
    return Output(*dense(shape if wanted else (0,), dtype), declared, wanted, rows)


def _levels_to_the_caller() -> int:
    """The ``stacklevel`` at which a warning shows the line that called us, not ours or torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        level, frame = level + 1, frame.f_back
    return level
