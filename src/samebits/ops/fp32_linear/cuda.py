"""CUDA backend of ``fp32_linear``: which kernels run a call. Every plan of a call has the same bits.

The products of ``timestep_mlp`` (ops/timestep_mlp/products.py), one at a time, and for each of the three a tile that is staged in
shared memory. Those of the backward have not run on a GPU yet, so they stand last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.fp32_linear.spec import SPEC
from samebits.ops.timestep_mlp import products
from samebits.ops.timestep_mlp.products import Plan
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

Steps = tuple[tuple[str, Launch], ...]
"""One way to a product: launches by what they do."""

_MANY_ROWS = 256
"""From here the forward takes tiles, where there are enough of them."""
_WAVES = 8
"""Blocks per multiprocessor up to which a product is cut finer, so that more of them wait side by side."""


def plans(call: Call) -> tuple[Plan, ...]:
    return tuple(dict.fromkeys(Plan(steps) for steps in (_backward(call) if call.backward else _forward(call))))


def _forward(call: Call) -> list[Steps]:
    streams: list[Steps] = []
    ways: list[Steps] = []
    for shape in products.forward_shapes(call.rows):
        step = products.linear(call, shape, "K", "N", ("x", "weight"), silu=0)
        ways.append((("y", step),))
        if dict(step.kernel.defines)["STREAM"]:
            streams.append(ways[-1])
    tiles = _forward_tiles(call)
    if tiles and call.rows >= _MANY_ROWS and call.size("N") >= 64 and 4 * _blocks(tiles) >= 3 * _processors(call):
        return [tiles, *ways]
    return _first(_finest(call, streams), ways, tiles)


def _backward(call: Call) -> list[Steps]:
    """The best way to every gradient, then the other ways, side by side."""
    sums = _sums(call) if {"grad_weight", "grad_bias"} & set(call.wanted) else [()]
    across = _across(call) if "grad_x" in call.wanted else [()]
    longest = max(len(sums), len(across))
    return [sums[min(i, len(sums) - 1)] + across[min(i, len(across) - 1)] for i in range(longest)]


def _sums(call: Call) -> list[Steps]:
    """The gradients of weight and bias."""
    streamed = products.weight_gradient(call, "weight", "bias", "N", "K", ("grad_y", "x"))
    return _first((("sums", streamed),), (), _sum_tiles(call))


def _across(call: Call) -> list[Steps]:
    """The gradient of x."""
    ways: list[Steps] = [
        tuple(products.across(call, "x", "N", "K", ("grad_y", "weight"), height, slope=0))
        for height in products.backward_heights(call.rows)
    ]
    folded = next(way for way in ways if len(way) == 1)
    spread = [way for way in ways if len(way) == 2]
    best: Steps = folded
    if spread and _blocks(folded) < _processors(call):
        best = _finest(call, spread) or min(spread, key=_blocks)
    return _first(best, ways, _across_tiles(call))


def _first(best: Steps, ways: Iterable[Steps], tiles: Steps) -> list[Steps]:
    return [way for way in (best, *ways, tiles) if way]


def _finest(call: Call, ways: Iterable[Steps]) -> Steps:
    """The way with the most blocks that run side by side, or none."""
    fitting = [way for way in ways if _blocks(way) <= _WAVES * _processors(call)]
    return max(fitting, key=_blocks, default=())


def _blocks(way: Steps) -> int:
    grid = way[0][1].grid
    return math.prod(grid) if isinstance(grid, tuple) else grid


def _processors(call: Call) -> int:
    return call.device.multiprocessors


# --- tiles ------------------------------------------------------------------------------------------------------------


def _forward_tiles(call: Call) -> Steps:
    """64 rows by 64 columns."""
    if not _whole(call, "x", "weight"):
        return ()
    return (("y", _tiles("linear_tile", (call.rows, 64), (call.size("N"), 64), 256)),)


def _across_tiles(call: Call) -> Steps:
    """32 rows by 32 columns."""
    if not _whole(call, "grad_y", "weight"):
        return ()
    return (("x", _tiles("across_tile", (call.rows, 32), (call.size("K"), 32), 64)),)


def _sum_tiles(call: Call) -> Steps:
    """64 by 32 results; the 64 lie where they leave less over."""
    if not _whole(call, "grad_y", "x"):
        return ()
    n, k = call.size("N"), call.size("K")
    wanted = {"WEIGHT": int("grad_weight" in call.wanted), "BIAS": int("grad_bias" in call.wanted)}
    if not wanted["WEIGHT"]:
        k = 1  # a block for the bias
    tall = -(-n // 64) * -(-k // 32) <= -(-n // 32) * -(-k // 64)
    sides = (64, 32) if tall else (32, 64)
    return (("sums", _tiles("weight_tile", (n, sides[0]), (k, sides[1]), 128, TALL=int(tall), **wanted)),)


def _tiles(entry: str, down: tuple[int, int], along: tuple[int, int], threads: int, **choices: int) -> Launch:
    """A block for each tile; ``down`` and ``along`` are a size and a tile's share of it."""
    grid = (-(-down[0] // down[1]), -(-along[0] // along[1]))
    return Launch(CudaKernel("fp32_linear", entry, tuple(sorted(choices.items()))), grid, threads)


def _whole(call: Call, *names: str) -> bool:
    """Tiles copy and store 16 bytes at a time."""
    return call.size("K") % 4 == 0 and call.size("N") % 4 == 0 and all(call.layout(name).aligned for name in names)


# --- launching --------------------------------------------------------------------------------------------------------


def run(
    call: Call,
    plan: Plan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    x, weight = inputs["x"], inputs["weight"]
    rows, n, k = call.rows, call.size("N"), call.size("K")
    if not call.backward:
        step, bias, y = plan["y"], inputs["bias"], results["y"]
        if step.kernel.entry == "linear_tile":
            launch(step, x, x.stride(0), weight, weight.stride(0), bias, y, rows, n, k)
        else:
            products.run_linear(step, x, weight, bias, y, None)
        return
    grad = inputs["grad_y"]
    if "sums" in plan:
        step, sums = plan["sums"], (results.get("grad_weight"), results.get("grad_bias"))
        if step.kernel.entry == "weight_tile":
            out = [0 if result is None else result for result in sums]
            launch(step, grad, grad.stride(0), x, x.stride(0), *out, rows, n, k)
        else:
            products.run_weight_gradient(step, grad, x, *sums)
    if "x" in plan:
        step, grad_x = plan["x"], results["grad_x"]
        if step.kernel.entry == "across_tile":
            launch(step, grad, grad.stride(0), weight, weight.stride(0), grad_x, rows, n, k)
        else:
            products.run_across(plan, "x", grad, weight, None, grad_x)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
