"""AdaLN conditioning across two operators, with the gradient of the table between them in FP32.

    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = adaln_modulation(temb, weight, bias, index)
    y = final_adaln_out(x, norm_weight, temb, weight, bias, timestep_indices)

A table row is used by thousands of positions. Autograd over two operators would round the sum of their gradients to the dtype
of the table, and everything behind it (temb, and the whole time embedder) would inherit that error. Each function here is one
autograd node: the forward has the bits of the two operators, the backward hands the FP32 sums straight to the projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.autograd import as_tuple, refuse_second_derivative, refuse_tangents
from samebits.checks import dtype_name
from samebits.contract import OpSpec
from samebits.operator import LIBRARY
from samebits.ops.adaln_projection.api import contract_for
from samebits.registry import operator
from samebits.segmentation import Segments, located

MODALITIES, CHUNKS = 3, 6
"""Rows that a timestep has in the table of a block, and modulations in such a row."""

_PROJECTION = operator("adaln_projection")
_GATHER = operator("adaln_row_gather")
_NORM = operator("rmsnorm_modulated")
_SIX = tuple(result.name for result in _GATHER.spec.forward.results)


def adaln_modulation(
    temb: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor | Segments,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The six modulations of every position of a MiniMax-H3 block: ``adaln_projection``, then ``adaln_row_gather``.

    Output channel o = m * 6 H + c * H + h of the projection is modality m, chunk c, channel h; table row t * 3 + m is timestep t.

    Args:
        temb: (T, D) FP32, one row per timestep.
        weight: (18 H, D) BF16, FP16 or FP32.
        bias: (18 H,), dtype of the weight.
        index: (S,) int64 table row of each position, as ``samebits.adaln_indices`` gives it, or ``samebits.segments`` of it.
        contract: of ``adaln_projection``: ``"kchain"`` or ``"fma"``; None: by the dtype of the weight.
        backend: of both operators, backward included; None takes the first that accepts the call.

    Returns:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp, each (S, H) in the dtype of weight and contiguous.
        Differentiable once in temb, weight and bias.

    Raises:
        TypeError, ValueError: as the two operators; a weight whose rows are no multiple of 18.
        IndexError: an index outside 0 .. 3 T - 1.

    Source: ``MiniMaxH3AdaLayerNormModulation`` of diffusers, and the row selection of its transformer block.
    """
    name = "adaln_modulation"
    _need_tensors(name, temb=temb, weight=weight, bias=bias)
    _need_timesteps(name, temb)
    parts = MODALITIES * CHUNKS
    if weight.dim() != 2 or weight.shape[0] % parts or weight.shape[0] == 0:
        raise ValueError(f"{name}: weight has shape {tuple(weight.shape)}, expected ({parts} * H, D)")
    lead = (
        tuple(index.shape)
        if isinstance(index, Tensor)
        else (index.index.numel(),)
        if isinstance(index, Segments)
        else ()
    )
    positions = located(name, index, MODALITIES * temb.shape[0], lead)
    return _call(name, temb, weight, bias, *positions, contract_for(weight, contract), backend)


def final_adaln_out(
    x: Tensor,
    norm_weight: Tensor,
    temb: Tensor,
    weight: Tensor,
    bias: Tensor,
    timestep_indices: Tensor | Segments,
    *,
    eps: float = 1e-5,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """The norm in front of MiniMax-H3's output heads: ``adaln_projection`` to shift and scale, then ``rmsnorm_modulated``.

    Args:
        x: (..., S, H) BF16, FP16 or FP32.
        norm_weight: (H,), dtype of x.
        temb: (T, D) FP32, one row per timestep.
        weight: (2 H, D), dtype of x: shift first, scale second.
        bias: (2 H,), dtype of x.
        timestep_indices: (S,) int64, shared by the batch, or (..., S), or ``samebits.segments`` of it: the timestep of each
            position itself, not the table row of a block.
        eps: of the norm; finite, at least 2^-126.
        contract: of ``adaln_projection``: ``"kchain"`` or ``"fma"``; None: by the dtype of the weight.
        backend: of both operators, backward included; None takes the first that accepts the call.

    Returns:
        (..., S, H) in the dtype of x, contiguous. Differentiable once in everything but the indices.

    Raises:
        TypeError, ValueError: as the two operators; weight has another dtype than x, or not 2 H rows.
        IndexError: an index outside 0 .. T - 1.

    Source: ``MiniMaxH3AdaLayerNormContinuous`` of diffusers (``norm_out``).
    """
    name = "final_adaln_out"
    _need_tensors(name, x=x, norm_weight=norm_weight, temb=temb, weight=weight, bias=bias)
    _need_timesteps(name, temb)
    if x.dim() < 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (..., S, H)")
    if weight.dtype != x.dtype:
        raise TypeError(f"{name}: weight has dtype {weight.dtype}, but x has {x.dtype}; they must agree")
    if weight.dim() != 2 or weight.shape[0] != 2 * x.shape[-1]:
        raise ValueError(f"{name}: weight has shape {tuple(weight.shape)}, expected (2 * H, D) with H = {x.shape[-1]}")
    positions = located(name, timestep_indices, temb.shape[0], x.shape[:-1])
    (value,) = _NORM._scalar_values({"eps": eps})
    given = (x, norm_weight, temb, weight, bias, *positions)
    (y,) = _call(name, *given, value, contract_for(weight, contract), backend)
    return y


def _need_tensors(name: str, **tensors: Any) -> None:
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a torch.Tensor, not {type(tensor).__name__}")


def _need_timesteps(name: str, temb: Tensor) -> None:
    if temb.dim() != 2 or temb.shape[0] == 0:
        raise ValueError(f"{name}: temb has shape {tuple(temb.shape)}, expected (T, D) with at least one timestep")


# --- the nodes --------------------------------------------------------------------------------------------------------


def _inputs(spec: OpSpec, known: dict[str, Tensor | None]) -> list[Tensor | None]:
    """The inputs of an explicit backward, in the order of its declaration."""
    return [known.get(arg.name) for arg in spec.backward.inputs]


def _projection_backward(
    ctx: Any, grad_table: Tensor, temb: Tensor, weight: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of temb, weight and bias, each in the dtype of its leaf, for an FP32 gradient of the table."""
    mask = list(needed)
    if not any(mask):
        return [None, None, None]
    results = _PROJECTION.below_autograd(
        True, grad_table, temb, weight, ctx.contract, ctx.backend, dtype_name(weight.dtype), mask
    )
    dtypes = (temb.dtype, weight.dtype, weight.dtype)
    return [value.to(dtype) if want else None for value, dtype, want in zip(results, dtypes, mask, strict=True)]


class _Modulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            table, results = _modulation(*args)
        temb, weight, _, *positions, ctx.contract, ctx.backend = args
        ctx.save_for_backward(temb, weight, table, *positions)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("adaln_modulation")
        temb, weight, table, *positions = ctx.saved_tensors
        known = dict(zip(("index", "order", "bounds"), positions, strict=True)) | {"table": table}
        known |= {f"grad_{name}": grad for name, grad in zip(_SIX, upstream, strict=True)}
        with torch._C._AutoDispatchBelowAutograd():
            contract = _GATHER.spec.default_contract.name
            given = _inputs(_GATHER.spec, known)
            (grad_rows,) = _GATHER.below_autograd(True, *given, contract, ctx.backend, "float32", [True])
            grad_table = grad_rows.view(temb.shape[0], weight.shape[0])
            gradients = _projection_backward(ctx, grad_table, temb, weight, ctx.needs_input_grad[:3])
        return (*gradients, None, None, None, None, None)


def _modulation(
    temb: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor,
    order: Tensor | None,
    bounds: Tensor | None,
    contract: str,
    backend: str | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(table rows (3 T, 6, H), the six)."""
    (table,) = _PROJECTION.below_autograd(False, temb, weight, bias, contract, backend)
    rows = table.view(MODALITIES * temb.shape[0], CHUNKS, weight.shape[0] // (MODALITIES * CHUNKS))
    six = _GATHER.below_autograd(False, rows, index, order, bounds, _GATHER.spec.default_contract.name, backend)
    return rows, six


class _FinalOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            scale, y, rstd = _final_out(*args)
        x, norm_weight, temb, weight, _, *positions, ctx.eps, ctx.contract, ctx.backend = args
        ctx.save_for_backward(x, norm_weight, temb, weight, scale, rstd, *positions)
        return (y,)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("final_adaln_out")
        x, norm_weight, temb, weight, scale, rstd, *positions = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        known = dict(zip(("index", "order", "bounds"), positions, strict=True))
        known |= {"grad_y": grad, "x": x, "weight": norm_weight, "scale": scale, "rstd": rstd}
        tables = any(needed[2:])
        wanted = [*needed[:2], tables, tables]
        with torch._C._AutoDispatchBelowAutograd():
            rest = (ctx.eps, _NORM.spec.default_contract.name, ctx.backend, dtype_name(x.dtype), wanted)
            results = _NORM.below_autograd(True, *_inputs(_NORM.spec, known), *rest)
            gradients = [value if want else None for value, want in zip(results[:2], wanted, strict=False)]
            grad_table = torch.cat(results[2:], dim=1) if tables else grad
            gradients += _projection_backward(ctx, grad_table, temb, weight, needed[2:])
        return (*gradients, None, None, None, None, None, None)


def _final_out(
    x: Tensor,
    norm_weight: Tensor,
    temb: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor,
    order: Tensor | None,
    bounds: Tensor | None,
    eps: float,
    contract: str,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale (T, H), a view of the table; y; rstd)."""
    (table,) = _PROJECTION.below_autograd(False, temb, weight, bias, contract, backend)
    shift, scale = table.chunk(2, dim=-1)
    given = (x, norm_weight, shift, scale, index, order, bounds, eps)
    y, rstd = _NORM.below_autograd(False, *given, _NORM.spec.default_contract.name, backend)
    return scale, y, rstd


# --- torch registration: opaque to a compiler, like the operators -----------------------------------------------------


def _modulation_plain(*args: Any) -> tuple[Tensor, ...]:
    return _modulation(*args)[1]


def _final_out_plain(*args: Any) -> Tensor:
    return _final_out(*args)[1]


_NODES = {
    "adaln_modulation": (
        "(Tensor temb, Tensor weight, Tensor bias, Tensor index, Tensor? order, Tensor? bounds, str contract, str? backend)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _modulation_plain,
        _Modulation,
    ),
    "final_adaln_out": (
        "(Tensor x, Tensor norm_weight, Tensor temb, Tensor weight, Tensor bias, Tensor index, Tensor? order, Tensor? bounds, "
        "float eps, str contract, str? backend) -> Tensor",
        _final_out_plain,
        _FinalOut,
    ),
}


def _call(name: str, *args: Any) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return as_tuple(getattr(torch.ops.samebits, name)(*args))
    return as_tuple(_autograd(name, *args))


def _autograd(name: str, *args: Any) -> Any:
    _, plain, node = _NODES[name]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    refuse_tangents(name, tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        results = node.apply(*args)
        return results if len(results) > 1 else results[0]
    with torch._C._AutoDispatchBelowAutograd():
        return plain(*args)


def _register() -> None:
    for name, (schema, plain, _) in _NODES.items():
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
        LIBRARY.impl(name, lambda *args, name=name: _autograd(name, *args), "Autograd")
        torch.library.register_fake(f"samebits::{name}", plain, lib=LIBRARY)


_register()
