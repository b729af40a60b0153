"""From a declaration to torch operators: schema, fake kernel, input checks, autograd, dispatch to a backend.

A call goes: public function -> torch op -> checks -> choice of backend and plan -> launch -> results. The torch op is
opaque, so no compiler can re-order or fuse what is inside, and the same checks run on real and on fake tensors.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits import dispatch
from samebits.contract import OpSpec, Result, TensorArg
from samebits.dispatch import Call, Choice, Layout, UnsupportedError
from samebits.runtime import device as devices

LIBRARY = torch.library.Library("samebits", "DEF")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Shapes:
    """The sizes one call agreed on."""

    lead: tuple[int, ...]
    """The batch axes as the caller gave them; T is their product."""
    sizes: dict[str, int]

    @property
    def rows(self) -> int:
        return math.prod(self.lead)

    def of(self, result: Result) -> tuple[int, ...]:
        return (*(self.lead if result.rows else ()), *(self.sizes[axis] for axis in result.axes))


class Request(NamedTuple):
    """A call as the torch op received it."""

    backward: bool
    tensors: Sequence[Tensor | None]
    scalars: Sequence[float]
    contract: str
    backend: str | None
    grad_dtype: str
    mask: Sequence[bool] | None
    """Which results are wanted; None: all."""


@dataclass(frozen=True)
class Prepared:
    """A call that passed its checks: what will run, on what."""

    call: Call
    choice: Choice
    shapes: Shapes
    inputs: dict[str, Tensor]
    copies: tuple[str, ...]
    """Inputs that no kernel can read in place, with the reason; they were copied to a dense layout, bytes unchanged."""


@dataclass(frozen=True)
class Decision:
    """Everything that follows from the metadata of a call. Made once for each, then looked up."""

    call: Call
    choice: Choice
    shapes: Shapes
    reasons: tuple[str | None, ...]
    """For each input why it must be copied, or None."""
    copies: tuple[str, ...]
    outputs: tuple[tuple[Result, tuple[int, ...], torch.dtype, bool], ...]
    """Each result with its shape and dtype, and whether it is wanted."""


KNOWN_CALLS = 4096
"""Decisions kept per operator; where shapes never repeat, the oldest are of no use."""


class Operator:
    """An operator at work. ``forward`` and ``backward`` are torch ops; results come in the order of the declaration."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._backends: dict[str, ModuleType] = {}
        self._told: set[str] = set()
        self._decisions: dict[tuple[Any, ...], Decision] = {}
        self._forward_op = self._register(backward=False)
        self._backward_op = self._register(backward=True)
        self._function = _autograd_function(self)
        LIBRARY.impl(self.name, self._autograd_kernel, "Autograd")
        LIBRARY.impl(f"{self.name}_backward", self._refuse_double_backward, "Autograd")

    # --- public entry points --------------------------------------------------------------------------------------

    def forward(
        self, *tensors: Tensor, contract: str | None = None, backend: str | None = None, **scalars: float
    ) -> tuple[Tensor, ...]:
        """All results, saved ones included, through the torch op (differentiable, compilable)."""
        self._need_tensors(self.spec.forward.inputs, tensors)
        name = self.spec.contract(contract).name
        arguments = (*tensors, *self._scalar_values(scalars), name, backend)
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return _tuple(self._forward_op(*arguments))
        with torch._C._AutoDispatchBelowAutograd():  # saves the detour through the autograd kernel
            return _tuple(self._forward_op(*arguments))

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
        if grad_dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"{self.name}_backward: grad_dtype must be torch.float32 or torch.bfloat16, not {grad_dtype}"
            )
        mask = [True] * len(self.spec.backward.results) if wanted is None else list(wanted)
        name = self.spec.contract(contract).name
        results = _tuple(
            self._backward_op(*tensors, *self._scalar_values(scalars), name, backend, dtype_name(grad_dtype), mask)
        )
        return tuple(result if want else None for result, want in zip(results, mask, strict=True))

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
    ) -> Prepared:
        """Check a call and decide how it runs, without running it. Raises as :func:`check` and ``dispatch.choose`` do."""
        decision = self._decision(Request(backward, tensors, scalars, contract, backend, grad_dtype, mask))
        return Prepared(
            decision.call, decision.choice, decision.shapes, self._inputs(decision, tensors), decision.copies
        )

    def _decision(self, request: Request) -> Decision:
        tensors, mask = request.tensors, request.mask
        if any(t is not None and t.layout is not torch.strided for t in tensors):
            check(self.spec, request)  # raises: no other layout is accepted
        key = (
            *(request.backward, request.contract, request.backend, request.grad_dtype, tuple(request.scalars)),
            *(None if mask is None else tuple(mask), dispatch.forced_plan()),
            *((t.dtype, t.shape, t.stride(), t.data_ptr() % 16, t.device) if t is not None else None for t in tensors),
        )
        known = self._decisions.get(key)
        if known is None:
            known = self._decide(request)
            if len(self._decisions) >= KNOWN_CALLS:
                self._decisions.clear()
            self._decisions[key] = known
        return known

    def _decide(self, request: Request) -> Decision:
        direction, mask = self.spec.direction(request.backward), request.mask
        shapes = check(self.spec, request)
        pairs = list(zip(direction.inputs, request.tensors, strict=True))
        given = [(arg, tensor) for arg, tensor in pairs if tensor is not None]
        views = {arg.name: _as_rows(arg, tensor, _obstacle(arg, tensor)) for arg, tensor in given}
        reasons = tuple(None if tensor is None else _obstacle(arg, tensor) for arg, tensor in pairs)
        wanted = tuple(result.name for index, result in enumerate(direction.results) if mask is None or mask[index])
        info = devices.info(given[0][1].device)
        call = Call(
            op=self.name,
            backward=request.backward,
            contract=request.contract,
            rows=shapes.rows,
            sizes=tuple(shapes.sizes.items()),
            layouts=tuple((name, _layout(view)) for name, view in views.items()),
            wanted=wanted,
            grad_dtype=request.grad_dtype,
            device=info,
        )
        names = [request.backend] if request.backend is not None else [b.name for b in self.spec.backends]
        installed = {name: devices.missing(name) for name in names}
        plans: dict[str, tuple[object, ...]] = {}
        for name in names:
            if dispatch.refusal(self.spec, name, info, installed) is None:
                plans[name] = self.backend(name).plans(call)
                break
        choice = dispatch.choose(self.spec, call, request.backend, installed, plans)
        copies = tuple(f"{a.name} ({why})" for a, why in zip(direction.inputs, reasons, strict=True) if why)
        outputs = tuple(
            (r, shapes.of(r) if r.name in wanted else (0,), _result_dtype(r, request.grad_dtype), r.name in wanted)
            for r in direction.results
        )
        return Decision(call, choice, shapes, reasons, copies, outputs)

    def _inputs(self, decision: Decision, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        args = self.spec.direction(decision.call.backward).inputs
        return {
            arg.name: _as_rows(arg, tensor, why)
            for arg, tensor, why in zip(args, tensors, decision.reasons, strict=True)
            if tensor is not None
        }

    def _launch(self, backward: bool, *args: Any) -> tuple[Tensor, ...]:
        """The body of both torch ops."""
        request = self._request(backward, args)
        decision = self._decision(request)
        if decision.copies or decision.choice.rejected:
            self._enforce_policy(decision, request.backend)
        call = decision.call
        inputs = self._inputs(decision, request.tensors)
        like = next(iter(inputs.values()))
        results = [like.new_empty(shape, dtype=dtype) for _, shape, dtype, _ in decision.outputs]
        if call.rows == 0:
            for (declared, *_), result in zip(decision.outputs, results, strict=True):
                if not declared.rows:
                    result.zero_()
        elif call.wanted:
            lead = len(decision.shapes.lead)
            rows = {
                declared.name: result.view(call.rows, *shape[lead:]) if declared.rows and lead != 1 else result
                for (declared, shape, _, wanted), result in zip(decision.outputs, results, strict=True)
                if wanted
            }
            named = {s.name: float(v) for s, v in zip(self.spec.scalars, request.scalars, strict=True)}
            run = self.backend(decision.choice.backend).run
            if like.is_cuda and like.get_device() != torch.cuda.current_device():
                with torch.cuda.device(like.device):
                    run(call, decision.choice.plan, inputs, rows, named)
            else:
                run(call, decision.choice.plan, inputs, rows, named)
        return tuple(results)

    def _enforce_policy(self, ready: Decision, asked: str | None) -> None:
        level = dispatch.strictness()
        if level == "silent":
            return
        notices = []
        if ready.copies:
            notices.append(f"copied to a dense layout: {', '.join(ready.copies)}")
        if asked is None and dispatch.slower_than_preferred(ready.choice, ready.call):
            notices.append(
                f"running on the slower backend {ready.choice.backend!r}: {'; '.join(ready.choice.rejected)}"
            )
        for notice in notices:
            if level == "strict":
                raise UnsupportedError(f"{self.name}: policy 'strict' forbids this call; {notice}")
            if notice not in self._told:
                self._told.add(notice)
                warnings.warn(
                    f"samebits.{self.name}: {notice} (said once; samebits.policy('strict') refuses it)", stacklevel=2
                )

    # --- torch registration ---------------------------------------------------------------------------------------

    def _register(self, backward: bool) -> Any:
        qualified = f"{self.name}_backward" if backward else self.name
        LIBRARY.define(qualified + schema(self.spec, backward))

        def launch(*args: Any) -> Any:
            results = self._launch(backward, *args)
            return results if len(results) > 1 else results[0]

        def fake(*args: Any) -> Any:
            request = self._request(backward, args)
            shapes, mask = check(self.spec, request), request.mask
            like = next(t for t in request.tensors if t is not None)
            results = tuple(
                like.new_empty(
                    shapes.of(result) if mask is None or mask[index] else (0,),
                    dtype=_result_dtype(result, request.grad_dtype),
                )
                for index, result in enumerate(self.spec.direction(backward).results)
            )
            return results if len(results) > 1 else results[0]

        LIBRARY.impl(qualified, launch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"samebits::{qualified}", fake, lib=LIBRARY)
        return getattr(torch.ops.samebits, qualified).default

    def _request(self, backward: bool, args: tuple[Any, ...]) -> Request:
        count = len(self.spec.direction(backward).inputs)
        end = count + len(self.spec.scalars)
        contract, backend, *rest = args[end:]
        grad_dtype, mask = rest if backward else ("float32", None)
        return Request(backward, args[:count], args[count:end], contract, backend, grad_dtype, mask)

    def _autograd_kernel(self, *args: Any) -> Any:
        count = len(self.spec.forward.inputs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in args[:count]):
            for arg, tensor in zip(self.spec.forward.inputs, args[:count], strict=True):
                if tensor.is_inference():
                    raise RuntimeError(
                        f"{self.name}: {arg.name} was created under torch.inference_mode() and cannot be saved for backward; "
                        f"pass {arg.name}.clone() made outside inference mode"
                    )
            results = self._function.apply(*args)
            return results if len(self.spec.forward.results) > 1 else results[0]
        with torch._C._AutoDispatchBelowAutograd():
            return self._forward_op(*args)

    def _refuse_double_backward(self, *args: Any) -> Any:
        count = len(self.spec.backward.inputs)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:count]):
            raise RuntimeError(
                f"{self.name}_backward is not differentiable: double backward (create_graph=True) is not supported, "
                "and a partial second derivative would be silently wrong"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return self._backward_op(*args)

    def _scalar_values(self, given: dict[str, float]) -> list[float]:
        unknown = set(given) - {s.name for s in self.spec.scalars}
        if unknown:
            raise TypeError(f"{self.name}: unknown argument {sorted(unknown)[0]!r}")
        values = []
        for scalar in self.spec.scalars:
            value = given.get(scalar.name, scalar.default)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{self.name}: {scalar.name} must be a number, not {value!r}")
            values.append(float(value))
        return values

    def _need_tensors(self, args: tuple[TensorArg, ...], tensors: tuple[Any, ...]) -> None:
        if len(tensors) != len(args):
            raise TypeError(
                f"{self.name}: expected {len(args)} tensors ({', '.join(a.name for a in args)}), got {len(tensors)}"
            )
        for arg, tensor in zip(args, tensors, strict=True):
            if tensor is None and arg.optional:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.name}: {arg.name} must be a torch.Tensor, not {type(tensor).__name__}")


def explain(operator: str, *tensors: Tensor | None, backward: bool = False, **options: Any) -> Prepared:
    """Which backend and launch plan a call would take, why, and which inputs it would copy. Runs nothing.

    ``options``: ``contract``, ``backend``, the operator's scalars, and for the backward ``grad_dtype`` and ``wanted``.
    """
    from samebits import registry

    op = registry.operator(operator)
    contract = op.spec.contract(options.pop("contract", None)).name
    backend = options.pop("backend", None)
    grad_dtype = dtype_name(options.pop("grad_dtype", torch.float32))
    wanted = options.pop("wanted", None)
    op._need_tensors(op.spec.direction(backward).inputs, tensors)
    return op.prepare(backward, tensors, op._scalar_values(options), contract, backend, grad_dtype, wanted)


def schema(spec: OpSpec, backward: bool) -> str:
    """The torch schema of one direction, without the name."""
    direction = spec.direction(backward)
    parts = [f"Tensor{'?' if arg.optional else ''} {arg.name}" for arg in direction.inputs]
    parts += [f"float {scalar.name}" for scalar in spec.scalars]
    parts += ["str contract", "str? backend"]
    if backward:
        parts += ["str grad_dtype", "bool[] wanted"]
    count = len(direction.results)
    returns = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
    return f"({', '.join(parts)}) -> {returns}"


def check(spec: OpSpec, request: Request) -> Shapes:
    """Refuse whatever the declaration does not accept, before anything is allocated or launched.

    TypeError for a dtype, ValueError for a shape, device or value; the message says what was wrong and what is accepted.
    """
    direction, mask = spec.direction(request.backward), request.mask
    title = f"{spec.name}_backward" if request.backward else spec.name
    spec.contract(request.contract)
    if mask is not None and len(mask) != len(direction.results):
        raise ValueError(f"{title}: wanted must have {len(direction.results)} entries, got {len(mask)}")
    fixed = dict(spec.fixed_sizes)
    limits = {axis: (least, most) for axis, least, most in spec.size_limits}
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    lead: tuple[int, ...] | None = None
    lead_owner = ""
    device: torch.device | None = None
    for arg, tensor in zip(direction.inputs, request.tensors, strict=True):
        if tensor is None:
            if not arg.optional:
                raise TypeError(f"{title}: {arg.name} must be a tensor, not None")
            continue
        if dtype_name(tensor.dtype) not in arg.dtypes:
            accepted = " or ".join(f"torch.{name}" for name in arg.dtypes)
            raise TypeError(f"{title}: {arg.name} has dtype {tensor.dtype}, expected {accepted}; cast it explicitly")
        if tensor.layout != torch.strided:
            raise ValueError(f"{title}: {arg.name} has layout {tensor.layout}, expected a strided (dense) tensor")
        form = f"({', '.join((['...'] if arg.rows else []) + [_axis(spec, axis) for axis in arg.axes])})"
        count = len(arg.axes)
        if tensor.dim() < count or (not arg.rows and tensor.dim() != count):
            raise ValueError(f"{title}: {arg.name} has shape {tuple(tensor.shape)}, expected {form}")
        split = tensor.dim() - count
        for axis, size in zip(arg.axes, tensor.shape[split:], strict=True):
            if axis in fixed and size != fixed[axis]:
                wrong = f"{axis} must be {fixed[axis]}, got {size}"
                raise ValueError(f"{title}: {arg.name} has shape {tuple(tensor.shape)}, expected {form}: {wrong}")
            if axis in limits and not limits[axis][0] <= size <= limits[axis][1]:
                raise ValueError(
                    f"{title}: {arg.name}: {axis} = {size} is outside {limits[axis][0]} .. {limits[axis][1]}"
                )
            if axis in sizes and size != sizes[axis]:
                raise ValueError(
                    f"{title}: {arg.name} has {axis} = {size}, but {owner[axis]} has {axis} = {sizes[axis]}"
                )
            sizes[axis] = size
            owner.setdefault(axis, arg.name)
        if arg.rows:
            here = tuple(tensor.shape[:split])
            if lead is None:
                lead, lead_owner = here, arg.name
            elif here != lead:
                raise ValueError(f"{title}: {arg.name} has batch shape {here}, but {lead_owner} has {lead}")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"{title}: {arg.name} is on {tensor.device}, but {direction.inputs[0].name} is on {device}"
            )
    for scalar, value in zip(spec.scalars, request.scalars, strict=True):
        if not (math.isfinite(value) and value >= scalar.minimum):
            raise ValueError(
                f"{title}: {scalar.name} = {value} must be finite and at least {scalar.minimum:g}, {scalar.why}"
            )
    assert lead is not None
    return Shapes(lead, sizes)


def _axis(spec: OpSpec, axis: str) -> str:
    return str(dict(spec.fixed_sizes).get(axis, axis))


def _result_dtype(result: Result, grad_dtype: str) -> torch.dtype:
    return DTYPES[grad_dtype if result.dtype == "grad" else result.dtype]


def _obstacle(arg: TensorArg, tensor: Tensor) -> str | None:
    """Why no kernel can read the input in place, or None.

    One rule for all operators: any row stride is read in place (also 0, also overlapping) as long as the last axis is
    dense and the batch axes collapse to one stride.
    """
    count = len(arg.axes)
    if count and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return f"last axis has stride {tensor.stride(-1)}"
    if arg.rows and tensor.dim() != count + 1:
        lead = tensor.dim() - count
        try:
            tensor.view(math.prod(tensor.shape[:lead]), *tensor.shape[lead:])
        except RuntimeError:
            return f"batch axes with strides {tensor.stride()[:lead]} do not collapse to rows"
    return None


def _as_rows(arg: TensorArg, tensor: Tensor, obstacle: str | None) -> Tensor:
    """The input as rows by trailing axes; copied to a dense layout, bytes unchanged, where there is an obstacle."""
    dense = tensor if obstacle is None else tensor.contiguous()
    lead = tensor.dim() - len(arg.axes)
    if not arg.rows or lead == 1:
        return dense
    return dense.view(math.prod(tensor.shape[:lead]), *tensor.shape[lead:])


def _layout(view: Tensor) -> Layout:
    outer = [stride for size, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True) if size > 1]
    itemsize = view.element_size()
    aligned = view.data_ptr() % 16 == 0 and all(stride * itemsize % 16 == 0 for stride in outer)
    return Layout(dtype_name(view.dtype), tuple(view.stride()), aligned)


def _tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _autograd_function(op: Operator) -> type[torch.autograd.Function]:
    """Autograd from the declaration: backward inputs named ``grad_<result>`` are upstream gradients, all others were saved."""
    spec = op.spec
    forward_inputs = [arg.name for arg in spec.forward.inputs]
    forward_results = [result.name for result in spec.forward.results]
    saved = [arg.name for arg in spec.backward.inputs if arg.name.removeprefix("grad_") not in forward_results]
    saved += [arg.name for arg in spec.backward.inputs if arg.name in forward_results]

    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results = _tuple(op._forward_op(*args))
        known = dict(zip(forward_inputs, args, strict=False)) | dict(zip(forward_results, results, strict=True))
        ctx.save_for_backward(*(known[name] for name in saved))
        ctx.rest = args[len(forward_inputs) :]
        ctx.set_materialize_grads(False)
        hidden = [result for result, declared in zip(results, spec.forward.results, strict=True) if declared.hidden]
        if hidden:
            ctx.mark_non_differentiable(*hidden)
        return results

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        known: dict[str, Tensor | None] = dict(zip(saved, ctx.saved_tensors, strict=True))
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{spec.name}: double backward (create_graph=True) is not supported; "
                "a partial second derivative would be silently wrong"
            )
        grads = {f"grad_{name}": grad for name, grad in zip(forward_results, upstream, strict=True)}
        tensors: list[Tensor | None] = []
        for arg in spec.backward.inputs:
            tensor = grads[arg.name] if arg.name in grads else known[arg.name]
            if tensor is None and not arg.optional:
                declared = spec.forward.result(arg.name.removeprefix("grad_"))
                like = next(t for t in known.values() if t is not None)
                tensor = like.new_zeros(ctx_shape(declared, known), dtype=DTYPES[declared.dtype])
            tensors.append(tensor)
        needed = dict(zip(forward_inputs, ctx.needs_input_grad, strict=False))
        mask = [needed[result.name.removeprefix("grad_")] for result in spec.backward.results]
        leaf = next(
            (spec.forward.input(r.name.removeprefix("grad_")) for r in spec.backward.results if r.dtype == "grad"), None
        )
        grad_dtype = leaf.dtypes[0] if leaf is not None else "float32"
        with torch._C._AutoDispatchBelowAutograd():
            results = _tuple(op._backward_op(*tensors, *ctx.rest, grad_dtype, mask))
        by_name = {
            result.name.removeprefix("grad_"): value
            for result, value, want in zip(spec.backward.results, results, mask, strict=True)
            if want
        }
        return (*(by_name.get(name) for name in forward_inputs), *([None] * len(ctx.rest)))

    def ctx_shape(declared: Result, known: dict[str, Tensor | None]) -> tuple[int, ...]:
        rows = next((known[a.name], a) for a in spec.forward.inputs if a.rows and known.get(a.name) is not None)
        tensor, arg = rows
        assert tensor is not None
        sizes = dict(spec.fixed_sizes)
        for other in spec.forward.inputs:
            value = known.get(other.name)
            if value is not None:
                sizes |= dict(zip(other.axes, value.shape[value.dim() - len(other.axes) :], strict=True))
        return (*tensor.shape[: tensor.dim() - len(arg.axes)], *(sizes[axis] for axis in declared.axes))

    return type(
        f"{spec.name}_function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
