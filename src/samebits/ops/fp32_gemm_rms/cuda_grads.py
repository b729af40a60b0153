"""The gradients of a controller projection on CUDA: of the weight, which composites share, and of x.

Floors of the ascending ones: 2 * T * N * K operations over 29.6 T/s each (109 us at T = 4096, K = 16384, N = 24); a
chain of grad_weight takes 4 T cycles. grad_x of the fast contracts has half the operations, and 4 bytes per element.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samebits.dispatch import Call
from samebits.ops.fp32_gemm_rms.cuda_sums import Projection, stream_strides, streams_of
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel

_OP = "fp32_gemm_rms"
_WARP = 32


@dataclass(frozen=True)
class GradWeightPlan:
    """How grad_weight is computed; ``launches`` run in order. Every plan leads to the same bits."""

    fast: bool
    launches: tuple[Launch, ...]


def grad_weight_plans(projection: Projection) -> tuple[GradWeightPlan, ...]:
    """Every plan, best first. Pure. ``weight_aligned`` of the projection is not looked at: weight is not read."""
    if projection.fast:
        from samebits.ops.fp32_gemm_rms import cuda_fast

        return cuda_fast.grad_weight_plans(projection)
    return tuple(GradWeightPlan(False, (step,)) for step in _grad_weight(projection))


def run_grad_weight(plan: GradWeightPlan, grad_proj: Tensor, x: Tensor, start: Tensor | None, out: Tensor) -> None:
    """out (N, K) FP32, contiguous: the fold over ascending rows, from ``start`` (N, K) or +0, of grad_proj * x.

    grad_proj is (T, N) FP32, x (T, K) or (T, H, D); both may have any row stride, and so may ``start``.
    """
    if plan.fast:
        from samebits.ops.fp32_gemm_rms import cuda_fast

        cuda_fast.run_grad_weight(plan, grad_proj, x, start, out)
        return
    (step,) = plan.launches
    begin = (0, 0) if start is None else (start, start.stride(0))
    upstream = (grad_proj, grad_proj.stride(0), x, *stream_strides(x))
    launch(step, *upstream, *begin, out, x.shape[0], *streams_of(x), out.shape[0])


# --- grad_weight, ascending -------------------------------------------------------------------------------------------

_COLUMNS, _WARPS, _ROWS, _STAGES, _PRODUCERS = 128, 4, 32, 4, 4
"""As in grad_weight_ascending.cu: a block has four warps over the same 128 columns, each with its own outputs."""
_EACH = (1, 3, 6, 8)
"""How many outputs a warp may have."""


def _grad_weight(projection: Projection) -> list[Launch]:
    """All outputs in one block, or at most 12 in each of several: whichever fills the multiprocessors better comes first."""
    bf16 = projection.x_dtype == "bfloat16"
    vec = 8 if bf16 and projection.x_aligned else 1
    columns = projection.streams * -(-projection.width // _COLUMNS)
    options: list[tuple[int, Launch]] = []
    all_in_one = next(each for each in _EACH if each * _WARPS >= projection.outputs)
    for each in (all_in_one, 3) if vec == 8 and all_in_one > 3 else (all_in_one,):
        groups = -(-projection.outputs // (_WARPS * each))
        defines = {
            "S": each,
            "ROWS": _ROWS,
            "STAGES": _STAGES,
            "PRODUCERS": _PRODUCERS,
            "VEC": vec,
            "X_BF16": int(bf16),
        }
        kernel = CudaKernel(_OP, "grad_weight_ascending", tuple(sorted(defines.items())))
        tile = _ROWS * (_COLUMNS * (2 if bf16 else 4) + _WARPS * -(-each // 4) * 16)
        step = Launch(kernel, (columns, groups), _WARP * (_WARPS + _PRODUCERS), _STAGES * tile)
        waves = -(-columns * groups // max(1, projection.device.multiprocessors))
        options.append((waves * (8 * each + 12), step))
    return [step for _, step in sorted(options, key=lambda option: option[0])]


# --- grad_x -----------------------------------------------------------------------------------------------------------

_THREADS, _MOST_TOKENS = 128, 64
"""As in grad_x.cu: a thread takes four columns, and a block that many tokens at most."""
_EXACT_OUTPUTS, _ANY_OUTPUTS = 24, 31
"""The number of outputs that has a kernel of its own, and the most that the other one takes."""


def grad_x_plans(call: Call) -> tuple[Launch, ...]:
    """Every launch that gives grad_x, best first: they differ in how many tokens share a read of the weight."""
    outputs, size = call.size("N"), call.size("K")
    bf16 = call.layout("x").dtype == "bfloat16"
    aligned = bf16 and size % 8 == 0 and call.layout("x").aligned and call.layout("weight").aligned
    defines = {
        "MAX_N": outputs if outputs == _EXACT_OUTPUTS else _ANY_OUTPUTS,
        "ANY_N": int(outputs != _EXACT_OUTPUTS),
        "FAST": int(call.contract.startswith("fast")),
        "VEC": 8 if aligned else 1,
        "X_BF16": int(bf16),
        "OUT_BF16": int(call.grad_dtype == "bfloat16"),
    }
    kernel = CudaKernel(_OP, "grad_x", tuple(sorted(defines.items())))
    across = -(-size // (_THREADS * 4))
    enough = -(-call.rows * across // (4 * max(1, call.device.multiprocessors)))  # tokens, for four blocks each
    best = min(_MOST_TOKENS, max(1, enough))
    return tuple(
        Launch(kernel, (-(-call.rows // tokens), across), _THREADS, arguments=(tokens,))
        for tokens in dict.fromkeys((best, _MOST_TOKENS, max(1, best // 2)))
    )


def run_grad_x(
    step: Launch, inputs: dict[str, Tensor], grad_proj: Tensor, grad_r: Tensor, out: Tensor, dsv4: bool
) -> None:
    """out (T, K): both legs, rounded once to its dtype. ``inputs`` has x, weight, r and q."""
    x, weight, r, q = inputs["x"], inputs["weight"], inputs["r"], inputs["q"]
    upstream = (grad_proj, grad_proj.stride(0), grad_r, grad_r.stride(0))
    saved = (x, x.stride(0), weight, weight.stride(0), r, r.stride(0), q, q.stride(0))
    launch(step, *upstream, *saved, out, *x.shape, weight.shape[0], *step.arguments, int(dsv4))
