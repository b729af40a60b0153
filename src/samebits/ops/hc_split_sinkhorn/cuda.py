"""CUDA backend of ``hc_split_sinkhorn``: which kernel runs a call, and its launch. Every plan of a call has the same bits.

Floors. Bytes are few (forward 192 per token, backward 288, over 4.2 TB/s), instructions are not. A step of the forward has 16
additions, 4 reciprocals of 3 instructions and 16 quotients of 3: 76 instructions, so 39 steps take 3000 per warp of tokens,
on an H200 (132 * 4 instructions per cycle at 1.75 GHz) 3.2 ns per warp. A pair of steps of the backward has 480, beside the
forward: 12 500 in all, 13.5 ns per warp. One token waits for its own chain: 39 steps, each a sum (12 cycles and 4 for eps),
a reciprocal (about 30) and a quotient (12), and what four columns cost more than one.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.hc_split_sinkhorn.spec import SPEC
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_WARP = 32
_TRACE = 19 * 16 * 4
"""Bytes of shared memory per token of the backward."""


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    """Threads never meet, so a block is only as large as the number of blocks asks for: one warp spreads best."""
    vec = {"VEC": 8 if call.aligned else 1}
    if call.backward:
        return tuple(
            _plan(call, "backward", vec | {"THREADS": threads}, threads, threads * _TRACE)
            for threads in (_WARP, 2 * _WARP)
        )
    many = call.rows > 32 * _WARP * call.device.multiprocessors  # more one-warp blocks than can be resident
    return tuple(_plan(call, "forward", vec, threads) for threads in ((128, _WARP) if many else (_WARP, 128)))


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    (step,) = plan
    logits = inputs["logits"]
    if not call.backward:
        launch(step, logits, logits.stride(0), results["pre"], results["post"], results["comb"], call.rows)
        return
    pre, post, comb = inputs["grad_pre"], inputs["grad_post"], inputs["grad_comb"]
    upstream = (pre, pre.stride(0), post, post.stride(0), comb, comb.stride(0), comb.stride(1))
    launch(step, *upstream, logits, logits.stride(0), results["grad_logits"], call.rows)


def _plan(call: Call, entry: str, defines: dict[str, int], block: int, shared: int = 0) -> tuple[Launch, ...]:
    kernel = CudaKernel("hc_split_sinkhorn", entry, tuple(sorted(defines.items())))
    return (Launch(kernel, -(-call.rows // block), block, shared),)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
