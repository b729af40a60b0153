"""CUDA backend of ``mhc_post``: which kernel runs a call, and its launch. Every plan of a call has the same bits.

Bytes per token at D columns, over 4.2 TB/s: forward 18 D. Backward: 8 D (BF16) or 16 D (FP32) for grad_streams, 8 D for
residual, 2 D for sublayer, each only where a wanted gradient needs it; 16 D and 4 D for grad_residual and grad_sublayer in
FP32, half of that in BF16. A fused block wants no grad_residual: 22 D, 21.5 ns a token at D = 4096.

``ascending`` has 20 chains of D dependent additions per token, 4 cycles each: 8.3 us at D = 4096, whatever the launch. At
22 D bytes a multiprocessor gets a token every 2.8 us, so a few tokens in flight hide the chains if each can run at nearly
its full speed. What a multiprocessor needs per column of a token, in cycles (memory brings one in 1.3 to 2.3):

* other warps form the products: 20 FP32 terms written to and read from shared memory at 128 bytes a cycle, 1.4. Too much.
* a lane per chain reads BF16 factors: 2 widenings, a product, a sum, a quarter of a load, for 20 lanes of a warp: 4.25
  instructions over four schedulers, 1.1. Runs where tokens are few.
* a lane for two chains with the same left row, three tokens per warp: 3 widenings, 2 products, 2 sums, 3/8 of a load are
  7.4 instructions for three tokens, 0.6; its shared memory takes 0.5 beside it. Runs where tokens are many. Copies and
  grad_sublayer bring it to about 0.9, grad_residual to about 1.2.

A warp does everything for its tokens: nothing waits at a barrier, and the schedulers share the work evenly.

``fast`` reads every byte once and keeps 20 partial sums per lane: per column 9 widenings, 20 products and 20 sums, 7 more
operations for grad_sublayer and 28 for grad_residual: 0.4 to 0.7 cycles.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.mhc_post.spec import SPEC
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_WARP = 32
_CHUNK = 128
"""Columns of a row that the ascending kernel holds at a time."""
_STREAMS = ("grad_residual", "grad_sublayer")
_SUMS = ("grad_comb", "grad_post")
_BYTES = {"float32": 4, "bfloat16": 2}


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    vec = 8 if call.size("D") % 8 == 0 and all(call.layout(name).aligned for name in _read(call)) else 1
    if not call.backward:
        return tuple(_plan("forward", {"VEC": vec}, grid, block) for grid, block in _columns(call, 8))
    upstream = call.layout("grad_streams").dtype
    out = call.grad_dtype if any(name in call.wanted for name in _STREAMS) else "float32"
    choices = {"VEC": vec, "G_BF16": int(upstream == "bfloat16"), "OUT_BF16": int(out == "bfloat16")}
    if not any(name in call.wanted for name in _SUMS):
        width = 8 if upstream == out == "bfloat16" else 4
        return tuple(_plan("backward_streams", choices, grid, block) for grid, block in _columns(call, width))
    if call.contract == "ascending":
        return tuple(_ascending(call, choices, chains, warps) for chains, warps in _warps(call, vec))
    choices["WANT_RESIDUAL"] = int("grad_residual" in call.wanted)
    rounds = (1,) if vec == 1 else (1, 2) if upstream == "float32" else (2, 1)
    return tuple(_plan("backward_fast", choices | {"UNROLL": n}, call.rows, 4 * _WARP) for n in rounds)


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    (step,) = plan
    size = call.size("D")
    residual, sublayer, comb, post = (inputs[name] for name in ("residual", "sublayer", "comb", "post"))
    old = (residual, residual.stride(0), residual.stride(1), sublayer, sublayer.stride(0))
    mix = (comb, comb.stride(0), comb.stride(1), post, post.stride(0))
    if not call.backward:
        launch(step, *old, *mix, results["streams"], size)
        return
    grad = inputs["grad_streams"]
    upstream = (grad, grad.stride(0), grad.stride(1))
    streams = [results.get(name, 0) for name in _STREAMS]
    if step.kernel.entry == "backward_streams":
        launch(step, *upstream, *mix, *streams, size)
        return
    sums = [results.get(name, 0) for name in _SUMS]
    counts = (size, call.rows) if call.contract == "ascending" else (size,)
    launch(step, *upstream, *old, *mix, *streams, *sums, *counts)


def _read(call: Call) -> tuple[str, ...]:
    """The inputs that a call reads."""
    if not call.backward:
        return tuple(name for name, _ in call.layouts)
    needs = {"grad_residual": "comb", "grad_sublayer": "post", "grad_comb": "residual", "grad_post": "sublayer"}
    return ("grad_streams", *(needs[name] for name in call.wanted))


def _columns(call: Call, width: int) -> list[tuple[tuple[int, int], int]]:
    """(grid, threads) that give every thread ``width`` columns of one token and leave no warp idle."""
    vectors = -(-call.size("D") // width)
    chosen = []
    for most in (128, 256):  # smaller blocks leave a multiprocessor sooner: 0.95 of copy bandwidth against 0.91
        blocks = -(-vectors // most)
        threads = -(-vectors // (blocks * _WARP)) * _WARP
        chosen.append(((call.rows, blocks), threads))
    return list(dict.fromkeys(chosen))


def _warps(call: Call, vec: int) -> list[tuple[int, int]]:
    """(chains per lane, warps per block), best first. Odd widths are read element by element, one token per warp."""
    many = call.rows > 8 * call.device.multiprocessors
    if vec == 1:
        return [(1, 2), (1, 1)] if many else [(1, 1), (1, 2)]
    return [(2, 2), (2, 1), (1, 4)] if many else [(1, 1), (2, 1)]


def _ascending(call: Call, choices: dict[str, int], chains: int, warps: int) -> tuple[Launch, ...]:
    stages = 4 if chains == 1 else 3  # a lone token leaves less time for the next chunk to arrive
    tokens = _WARP // (20 // chains)
    right, left = (_CHUNK * _BYTES[call.layout(name).dtype] + 16 for name in ("grad_streams", "residual"))
    shared = tokens * (stages * (4 * right + 5 * left) + 20 * 4)
    choices = choices | {"CHAINS": chains, "STAGES": stages}
    return _plan("backward_ascending", choices, -(-call.rows // (tokens * warps)), warps * _WARP, warps * shared)


def _plan(
    entry: str, defines: dict[str, int], grid: int | tuple[int, int], block: int, shared: int = 0
) -> tuple[Launch, ...]:
    return (Launch(CudaKernel("mhc_post", entry, tuple(sorted(defines.items()))), grid, block, shared),)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
