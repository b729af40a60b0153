"""What the Triton backends share: tiles, the summation orders as device code, the launch and its audit builds.

The orders are those of :mod:`samebits.exact.fold`, one function each. The order inside a Triton reduction is the
compiler's business, so ``tl.sum`` is only ever asked to add *two* terms, and an IEEE addition commutes.

Triton's own specialisation (an integer that is 1 or divides by 16, a pointer that is aligned) is switched off by
:func:`kernel`. What a kernel may assume is a ``tl.constexpr`` that the launch plan sets, so a call's build follows
from its plan and its dtypes alone, and the audit can list them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from samebits.dispatch import Call
from samebits.runtime.triton_build import OPTIONS, TritonKernel

# --- host -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """The part of a (rows, width) array that one program works on at a time. Never touches the bits."""

    rows: int
    width: int
    num_warps: int
    stages: int = 1
    """Tiles in flight where the program loops over them (asynchronous copies to shared memory); 1 copies nothing."""


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` without specialisation on values: one build per set of types and constexprs, no hidden ones."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def aligned(call: Call, axis: str) -> bool:
    """Whether every row of every tensor, results included, can be read and written 16 bytes at a time."""
    return call.aligned and call.size(axis) % 8 == 0


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constexprs: Any) -> None:
    """Enqueue on torch's current stream of the current device. Rows go on grid axis 0, which holds 2^31 - 1."""
    function[grid](*arguments, **constexprs, num_warps=num_warps, **OPTIONS)


def build(function: Any, pointers: dict[str, str | None], num_warps: int, **constexprs: Any) -> TritonKernel:
    """The kernel that :func:`launch` runs for these pointer types (None: the tensor is absent) and constexprs."""
    signature: list[tuple[str, str]] = []
    constants = dict(constexprs)
    for parameter in function.params:
        if not parameter.annotation:
            kind = pointers[parameter.name]
            if kind is None:
                constants[parameter.name] = None
            signature.append((parameter.name, kind or "constexpr"))
        else:
            signature.append((parameter.name, parameter.annotation))
    return TritonKernel(function, tuple(signature), tuple(constants.items()), num_warps)


def pointer(dtype: str) -> str:
    """Triton's name of a pointer to a dtype of the contract."""
    return {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}[dtype]


# --- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def load(rows, here, d, D, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements ``d`` of the rows that start at ``rows``, as stored; +0 where a row is not ``here`` or d >= D.

    A product of such loads is +0 outside, whatever lies there. ``here=None`` means every row exists. ``ALIGNED``
    changes no value: it promises that every 8 elements start on 16 bytes and are inside or outside together.
    """
    pointers, inside = _tile(rows, here, d, D, ALIGNED)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store(rows, here, d, D, values, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The counterpart of :func:`load`: ``values`` rounded once, to nearest even, to the type of the tensor.

    Values that already have this type keep their bytes.
    """
    pointers, inside = _tile(rows, here, d, D, ALIGNED)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _tile(rows, here, d, D, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointers = rows + d
    inside = d < D if here is None else here & (d < D)
    if ALIGNED:  # a hint counts only on the operation that made the value, hence here and not in the caller
        if len(pointers.shape) == 2:
            pointers = tl.multiple_of(pointers, (1, 16))
            inside = tl.max_constancy(inside, (1, 8))
        else:
            pointers = tl.multiple_of(pointers, (1, 1, 16))
            inside = tl.max_constancy(inside, (1, 1, 8))
    return pointers, inside


@triton.jit
def product(a, b):  # type: ignore[no-untyped-def]
    """a * b, rounded, where an addition follows. Plain ``*`` may become a packed ``mul.rn.f32x2`` on Blackwell, which
    ptxas contracts with a packed addition even though both say ``.rn``; what is written as text stays scalar."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


# --- orders -----------------------------------------------------------------------------------------------------------


@triton.jit
def left_fold(acc, terms, CHAINS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc = acc + terms[:, 0]; acc = acc + terms[:, 1]; ... : ``CHAINS`` folds side by side, first half first."""
    if WIDTH == 1:
        return acc + tl.reshape(terms, (CHAINS,))
    else:
        first, second = tl.split(tl.permute(tl.reshape(terms, (CHAINS, 2, WIDTH // 2)), (0, 2, 1)))
        acc = left_fold(acc, first, CHAINS, WIDTH // 2)
        return left_fold(acc, second, CHAINS, WIDTH // 2)


@triton.jit
def halving_tree(partials, ROWS: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """p[u] = p[u] + p[u + half], half = COUNT/2, ..., 2, 1, over the last axis of (ROWS, COUNT)."""
    if COUNT == 1:
        return tl.reshape(partials, (ROWS,))
    else:
        pairs = tl.reshape(partials, (ROWS, 2, COUNT // 2))
        return halving_tree(tl.sum(pairs, 1), ROWS, COUNT // 2)
