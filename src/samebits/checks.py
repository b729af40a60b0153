"""What a call is and whether the declaration accepts it: dtypes, shapes, devices, values, strides. Nothing runs here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.contract import OpSpec, Result, TensorArg
from samebits.dispatch import Layout

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


FLOAT32_MAX = 3.4028234663852886e38


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
    out_dtype: str | None = None
    """What wide results are asked for in; None: as declared."""


def check(spec: OpSpec, request: Request) -> Shapes:
    """Refuse whatever the declaration does not accept, before anything is allocated or launched.

    TypeError for a dtype, ValueError for a shape, device or value; the message says what was wrong and what is accepted.
    """
    direction, mask = spec.direction(request.backward), request.mask
    title = f"{spec.name}_backward" if request.backward else spec.name
    contract = spec.contract(request.contract)
    if mask is not None and len(mask) != len(direction.results):
        raise ValueError(f"{title}: wanted must have {len(direction.results)} entries, got {len(mask)}")
    fixed = dict(spec.fixed_sizes)
    limits = {axis: (least, most) for axis, least, most in spec.size_limits}
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    dtypes: dict[str, torch.dtype] = {}
    lead: tuple[int, ...] | None = None
    lead_owner = ""
    device: torch.device | None = None
    for arg, tensor in zip(direction.inputs, request.tensors, strict=True):
        if tensor is None:
            if not arg.optional:
                raise TypeError(f"{title}: {arg.name} must be a tensor, not None")
            continue
        if dtype_name(tensor.dtype) not in contract.accepted(arg):
            accepted = " or ".join(f"torch.{name}" for name in contract.accepted(arg))
            where = f" under contract {contract.name!r}" if dtype_name(tensor.dtype) in arg.dtypes else ""
            raise TypeError(
                f"{title}: {arg.name} has dtype {tensor.dtype}, expected {accepted}{where}; cast it explicitly"
            )
        if arg.like and tensor.dtype != dtypes.setdefault(arg.like, tensor.dtype):
            raise TypeError(
                f"{title}: {arg.name} has dtype {tensor.dtype}, but {arg.like} has {dtypes[arg.like]}; they must agree"
            )
        dtypes[arg.name] = tensor.dtype
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
    for axis, factors in spec.products:
        known = fixed | sizes
        if axis in sizes and all(factor in known for factor in factors):
            size = math.prod(known[factor] for factor in factors)
            if sizes[axis] != size:
                by = " * ".join(f"{factor} ({known[factor]})" for factor in factors)
                raise ValueError(f"{title}: {owner[axis]} has {axis} = {sizes[axis]}, but {axis} = {by} = {size}")
    why = spec.misfit(sizes)
    if why is not None:
        raise ValueError(f"{title}: {why}")
    for scalar, value in zip(spec.scalars, request.scalars, strict=True):
        if not scalar.minimum <= value <= FLOAT32_MAX:
            accepted = f"must be finite in FP32 and at least {scalar.minimum:g}"
            raise ValueError(f"{title}: {scalar.name} = {value} {accepted}, {scalar.why}")
    if request.grad_dtype not in spec.gradient_dtypes:
        accepted = " or ".join(f"torch.{name}" for name in spec.gradient_dtypes)
        raise TypeError(f"{title}: grad_dtype must be {accepted}, not {request.grad_dtype}")
    possible = spec.gradient_dtypes_of({name: dtype_name(dtype) for name, dtype in dtypes.items()})
    if request.backward and request.grad_dtype not in possible:
        accepted = " or ".join(f"torch.{name}" for name in possible)
        raise TypeError(f"{title}: grad_dtype must be {accepted} for these inputs, not torch.{request.grad_dtype}")
    if request.out_dtype is not None:
        own = {dtype_name(dtypes[result.dtype]) for result in direction.wide}
        if not own:
            raise TypeError(f"{title}: unknown argument 'out_dtype'")
        if request.out_dtype not in own | {"float32"}:
            accepted = " or ".join(f"torch.{name}" for name in ("float32", *sorted(own)))
            raise TypeError(f"{title}: out_dtype must be {accepted} for these inputs, not torch.{request.out_dtype}")
    assert lead is not None
    return Shapes(lead, spec.complete(sizes))


def _axis(spec: OpSpec, axis: str) -> str:
    return str(dict(spec.fixed_sizes).get(axis, axis))


def obstacle(arg: TensorArg, tensor: Tensor) -> str | None:
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


def as_rows(arg: TensorArg, tensor: Tensor, obstacle: str | None) -> Tensor:
    """The input as rows by trailing axes; copied to a dense layout, bytes unchanged, where there is an obstacle."""
    dense = tensor if obstacle is None else tensor.contiguous()
    lead = tensor.dim() - len(arg.axes)
    if not arg.rows:
        return dense
    rows = dense if lead == 1 else dense.view(math.prod(tensor.shape[:lead]), *tensor.shape[lead:])
    if rows.shape[0] == 1 and rows.stride(0) * rows.element_size() % 16:
        # The stride of a single row leads nowhere, but a kernel may add it to an address that it then does not read, and
        # vector copies want even those aligned.
        return rows[0].unsqueeze(0)
    return rows


def layout_of(view: Tensor) -> Layout:
    outer = [stride for size, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True) if size > 1]
    itemsize = view.element_size()
    aligned = view.data_ptr() % 16 == 0 and all(stride * itemsize % 16 == 0 for stride in outer)
    return Layout(dtype_name(view.dtype), tuple(view.stride()), aligned)
