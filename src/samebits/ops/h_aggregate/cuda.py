"""CUDA backend of ``h_aggregate``: which kernel runs a call, and its launch. Every plan of a call has the same bits.

Floors per token at D columns, over 4.2 TB/s: forward 10 D bytes; backward 28 D with FP32 gradients, 18 D with BF16.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.h_aggregate.spec import SPEC
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_WARP = 32


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    vec = {"VEC": 8 if call.aligned and call.size("D") % 8 == 0 else 1}
    if not call.backward:
        return tuple(_plan("forward", vec, grid, threads) for grid, threads in _columns(call))
    want_residual = "grad_residual" in call.wanted
    choices = vec | {
        "G_BF16": int(call.layout("grad_hidden").dtype == "bfloat16"),
        "OUT_BF16": int(want_residual and call.grad_dtype == "bfloat16"),
        "WANT_RESIDUAL": int(want_residual),
    }
    if "grad_pre" not in call.wanted:
        return tuple(_plan("backward_residual", choices, grid, threads) for grid, threads in _columns(call))
    many = call.rows > 2 * call.device.multiprocessors
    if call.contract == "ascending":
        # One token waits for its chain, many share the memory system: a smaller block leaves more of them in flight.
        producers = (64, 128) if many else (128, 64)
        return tuple(_plan("backward_ascending", choices | {"PRODUCERS": p}, call.rows, p + _WARP) for p in producers)
    return tuple(_plan("backward_tree256", choices | {"UNROLL": n}, call.rows, 4 * _WARP) for n in (8, 2))


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    (step,) = plan
    pre, residual = inputs["pre"], inputs["residual"]
    size = call.size("D")
    if not call.backward:
        launch(step, pre, pre.stride(0), residual, residual.stride(0), residual.stride(1), results["hidden"], size)
        return
    grad = inputs["grad_hidden"]
    grad_residual = results.get("grad_residual", 0)
    common = (grad, grad.stride(0), pre, pre.stride(0))
    if "grad_pre" not in call.wanted:
        launch(step, *common, grad_residual, size)
        return
    streams = (residual, residual.stride(0), residual.stride(1))
    launch(step, *common, *streams, results["grad_pre"], grad_residual, size)


def _columns(call: Call) -> list[tuple[tuple[int, int], int]]:
    """(grid, threads) that give every thread one vector of one token and leave no warp idle."""
    vectors = -(-call.size("D") // 8)
    chosen = []
    for most in (512, 256, 128):
        blocks = -(-vectors // most)
        threads = -(-vectors // (blocks * _WARP)) * _WARP
        chosen.append(((call.rows, blocks), threads))
    return list(dict.fromkeys(chosen))


def _plan(entry: str, defines: dict[str, int], grid: int | tuple[int, int], block: int) -> tuple[Launch, ...]:
    return (Launch(CudaKernel("h_aggregate", entry, tuple(sorted(defines.items()))), grid, block),)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
