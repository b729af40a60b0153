"""What the Triton backends share: the summation orders as device code, aligned tiles, and the launch.

The orders are those of :mod:`samebits.exact.fold`, one function each. ``tl.sum`` takes no part: the order inside a
Triton reduction is the compiler's business, so it is only ever asked to add *two* terms, and that addition commutes.

Triton's own specialisation (an integer that is 1 or divides by 16, a pointer that is aligned) is switched off by
:func:`kernel`: what a kernel may assume is a ``tl.constexpr`` that the launch plan sets, so the variants that run are
exactly those that ``builds()`` lists for the audit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from samebits.runtime.triton_build import OPTIONS

VECTOR_BYTES = 16
"""The widest access of one thread. A launch is ``ALIGNED`` if every row starts on such a boundary."""


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` without specialisation on values: one build per set of types and constexprs, no hidden ones."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constexprs: Any) -> None:
    """Enqueue a kernel on torch's current stream of the current device. Rows go on grid axis 0, which holds 2^31 - 1."""
    function[grid](*arguments, **constexprs, num_warps=num_warps, **OPTIONS)


@triton.jit
def load(rows, here, d, D, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements ``d`` of the rows that start at ``rows``, as stored; +0 where a row is not ``here`` or d >= D.

    Products of two such loads are +0 outside, whatever the neighbours hold. ``ALIGNED`` changes no value: it promises
    that every 8 elements start on 16 bytes and are inside or outside together, so one thread reads them at once.
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
    inside = here & (d < D)
    if ALIGNED:
        if len(pointers.shape) == 2:
            pointers = tl.multiple_of(pointers, (1, 16))
            inside = tl.max_constancy(inside, (1, 8))
        else:
            pointers = tl.multiple_of(pointers, (1, 1, 16))
            inside = tl.max_constancy(inside, (1, 1, 8))
    return pointers, inside


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
        return halving_tree(tl.reduce(pairs, 1, _add), ROWS, COUNT // 2)


@triton.jit
def _add(left, right):  # type: ignore[no-untyped-def]
    return left + right
