"""The forward of ``mhc_pre``, ``mhc_pre_norm`` and ``hyper_head`` on CUDA: launches, and who allocates what.

Two kernels where one block can do a token's controller beside its columns, three where the controllers of all tokens come
first; the bits are the same:

* the raw sums of the projection (``fp32_gemm_rms``), by whichever of its plans;
* ``weights.cu``, a thread per token: 39 dependent normalisations take about 2 us however many tokens there are;
* ``collapse.cu``: the streams once more, and hidden. Under ``fast*`` the norm is taken while the row is in registers; under
  ``ascending*`` rmsnorm_residual's own kernel follows, because one lane per token that folds D squares behind a barrier
  would hold the registers of the whole block for 4 D cycles, where that kernel folds nine rows side by side.

Floors per token at D columns: 8 D bytes for the projection, 10 D for the collapse (12 D with the norm), over 4.2 TB/s. What
the projection read last is still in L2, so the collapse goes through the tokens backwards.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.dispatch import Call, Layout
from samebits.ops.fp32_gemm_rms.cuda_sums import SumsPlan, projection, run_sums, sums_plans
from samebits.ops.rmsnorm_residual import cuda as rmsnorm
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel

_WARP = 32
_STREAMS = 4
_TOKENS = 32
"""Tokens of a block of weights.cu."""
_HOLDS = {128: (1, 4, 7), 256: (1, 2, 4)}
"""Threads per token, and how many vectors of each stream a thread may keep in registers."""


@dataclass(frozen=True)
class ForwardPlan:
    """The launches of a forward. ``weights`` is None where the collapse does its work, ``norm`` where it does the norm too
    or there is none. Every plan leads to the same bits."""

    sums: SumsPlan
    weights: Launch | None
    collapse: Launch
    norm: tuple[Launch, ...] = ()
    norm_call: Call | None = None
    """What is asked of rmsnorm_residual."""

    def __iter__(self) -> Iterator[Launch]:
        yield from self.sums.launches
        if self.weights is not None:
            yield self.weights
        yield self.collapse
        yield from self.norm

    def __str__(self) -> str:
        return "; then ".join(str(step) for step in self)


def plans_forward(call: Call) -> tuple[ForwardPlan, ...]:
    """Every plan of a forward, best first. Pure. The call is one of ``mhc_pre``, ``mhc_pre_norm`` or ``hyper_head``."""
    sums = sums_plans(projection(call, "residual"))
    ends = _ends(call)
    norm_call = _norm_call(call) if call.has("gamma") and not _fast(call) else None
    norms = rmsnorm.plans(norm_call) if norm_call is not None else ((),)

    def plan(i: int) -> ForwardPlan:
        return ForwardPlan(sums[i % len(sums)], *ends[i % len(ends)], norms[i % len(norms)], norm_call)

    return tuple(plan(i) for i in range(max(len(sums), len(ends), len(norms))))


def run_forward(
    call: Call,
    plan: ForwardPlan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    """Fill all results; scratch memory is allocated here."""
    residual, weight, hidden = inputs["residual"], inputs["weight"], results["hidden"]
    rows, size = call.rows, call.size("D")
    parts = residual.new_empty((plan.sums.parts, rows, weight.shape[0] + 1), dtype=torch.float32)
    run_sums(plan.sums, residual, weight, parts)

    given = (parts, plan.sums.parts, inputs["gain"], inputs["bias"])
    found = [results.get(name, 0) for name in ("pre", "post", "comb", "logits", "proj", "r", "q")]
    controller = (*given, *found, rows, _STREAMS * size, ctypes.c_float(scalars["eps"]))
    if plan.weights is not None:
        launch(plan.weights, *controller)
    norm: tuple[Tensor | int, ...] = (0, 0, 0)
    if call.has("gamma") and plan.norm_call is None:
        norm = (inputs["gamma"], results["normalized"], results["rstd"])
    norm_eps = scalars.get("norm_eps", 0.0)
    streams = (residual, residual.stride(0), residual.stride(1))
    launch(plan.collapse, *controller, *streams, hidden, *norm, size, ctypes.c_float(norm_eps))
    if plan.norm_call is not None:
        normed = {"y": results["normalized"], "rstd": results["rstd"]}
        rmsnorm.run(plan.norm_call, plan.norm, {"x": hidden, "gamma": inputs["gamma"]}, normed, {"eps": norm_eps})


def _fast(call: Call) -> bool:
    return call.contract.startswith("fast")


def _ends(call: Call) -> list[tuple[Launch | None, Launch]]:
    """(weights, collapse) pairs, best first: few tokens are spread over many threads, many over small blocks."""
    form = {
        "HEAD": int(call.size("N") == _STREAMS),
        "IS_FAST": int(_fast(call)),
        "IS_DSV4": int(call.contract.endswith("-dsv4")),
    }
    weights = Launch(_kernel("weights", form), -(-call.rows // _TOKENS), 128)
    wide, narrow = (_collapse(call, lanes, form) for lanes in (256, 128))
    alone = _collapse(call, 128, {})
    few = call.rows <= 2 * call.device.multiprocessors
    fused = (wide, narrow) if few else (narrow, wide)
    return [(None, fused[0]), (weights, alone), (None, fused[1])]


def _collapse(call: Call, lanes: int, form: dict[str, int]) -> Launch:
    """``form`` is what the kernel must know to do a token's controller too; empty where weights.cu has done it."""
    norm = int(call.has("gamma") and _fast(call))
    aligned = call.layout("residual").aligned and not (norm and not call.layout("gamma").aligned)
    vec = 8 if call.size("D") % 8 == 0 and aligned else 1
    vectors = -(-call.size("D") // 8)
    hold = next((h for h in _HOLDS[lanes] if h * lanes >= vectors), 0) if vec == 8 else 0
    choices = {"VEC": vec, "LANES": lanes, "HOLD": hold, "NORM": norm, "FUSED": int(bool(form)), **form}
    return Launch(_kernel("collapse", choices), call.rows, lanes + (_WARP if form else 0))


def _norm_call(call: Call) -> Call:
    size = call.size("D")
    hidden = Layout("bfloat16", (size, 1), size % 8 == 0)
    return dataclasses.replace(
        call,
        op="rmsnorm_residual",
        contract="ascending",
        layouts=(("x", hidden), ("gamma", call.layout("gamma"))),
        wanted=("y", "rstd"),
    )


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel("mhc_pre", entry, tuple(sorted(choices.items())))
