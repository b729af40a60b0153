"""The backward of ``mhc_pre`` on CUDA; ``hyper_head`` (N = 4, no post and comb) and ``mhc_pre_norm`` run it too.

Four steps behind one another, because a token needs its grad_pre, a sum over D, before anything else:

* fold: h_aggregate's kernel for grad_pre alone;
* ``backward_controller.cu``: from there to grad_proj and grad_r, all that is small;
* grad_weight: the kernels of ``fp32_gemm_rms``;
* ``backward_merge.cu``: grad_residual, all legs in registers and one rounding; some of its warps fold grad_gain and
  grad_bias meanwhile, for which ``backward_tokens.cu`` is there where grad_residual is not wanted.

Floors per token at D columns (K = 4 D, N = 24), bytes over 4.2 TB/s and FP32 instructions per lane over 29.6 T/s:

=============  ======================================  ==================================  ===========================
kernel         bytes                                   instructions                        T = 4096, D = 4096
=============  ======================================  ==================================  ===========================
fold           8 D + 2 D (grad_hidden BF16, FP32 4 D)  8 D                                 40 us (48 us)
grad_weight    8 D                                     192 D, fast: tensor cores           109 us, fast: 32 us
merge          8 D + 8 D (grad_streams) + 2 D or 4 D   4 D (48 + 23), fast: 4 D (24 + 12)  161 us, fast: 104 us (112 us)
               + 8 D (BF16 out, FP32 16 D)
all            44 D to 56 D                            484 D, fast: 152 D                  310 us, fast: 176 us
=============  ======================================  ==================================  ===========================

The rest hides or is short: fold's chain takes 4 D cycles (8 us), Sinkhorn's about 5 us for up to 21 thousand tokens at once
(what shared memory holds), the chains of grad_gain and grad_bias 4 T cycles (8 us at 4096, 66 us at 32768) in the shadow of
the merge.

Of the 71 instructions per element of an ascending merge, 48 are the projection leg and about 10 the division of the RMS leg;
fast has fused multiply-adds and one division per row, and is left with 24 + 1 + 3 + 8. What moves data adds about 22, counted
in the code for sm_90 (58 and 93 in all, so 131 and 211 us at T = 4096). It is no more because a thread keeps two columns of
two streams: their 96 weights fit into registers, and the 24 grad_proj of a token, 16-byte reads from shared memory that all
lanes share, serve four elements. One column would need twice the reads, four columns twice the registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.ops.fp32_gemm_rms.cuda_grads import GradWeightPlan, grad_weight_plans, run_grad_weight
from samebits.ops.fp32_gemm_rms.cuda_sums import projection
from samebits.ops.h_aggregate import cuda as h_aggregate
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel

_STREAMS = 4
_CHAINS = ("gain", "bias")
_TILE, _GROUP, _BLOCK = 128, 8, 128
"""Of the merge: columns of a block, the tokens it takes at a time, and its threads."""
_RESIDENT = {(False, 8): 3, (False, 1): 2, (True, 8): 6, (True, 1): 4}
"""Blocks of the merge that share a multiprocessor, by (few outputs, VEC): BLOCKS in the kernel."""
_ONE_FACTOR, _DIVISION, _RECIPROCAL = 0, 1, 2
"""The forms of the RMS leg in ``record.cuh``."""


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of a backward, in order; those that are not needed are None. Every plan leads to the same bits."""

    fold_call: Call
    """What is asked of h_aggregate."""
    fold: tuple[Launch, ...]
    controller: Launch
    tokens: Launch | None
    weight: GradWeightPlan | None
    merge: Launch | None

    def __iter__(self) -> Iterator[Launch]:
        yield from self.fold
        yield self.controller
        if self.tokens is not None:
            yield self.tokens
        if self.weight is not None:
            yield from self.weight.launches
        if self.merge is not None:
            yield self.merge

    def __str__(self) -> str:
        return "; then ".join(str(step) for step in self)


def plans_backward(call: Call) -> tuple[BackwardPlan, ...]:
    """Every plan of a backward, best first. Pure.

    The call is one of ``mhc_pre`` or ``hyper_head``; ``mhc_pre_norm`` asks for what stands behind its norm, with
    ``grad_hidden`` in FP32. At least one of grad_residual, grad_weight, grad_gain and grad_bias is wanted.
    """
    fold_call = dataclasses.replace(
        call,
        op="h_aggregate",
        contract="tree256" if _fast(call) else "ascending",
        layouts=tuple((name, call.layout(name)) for name in ("grad_hidden", "residual")),  # nothing else is read
        wanted=("grad_pre",),
    )
    folds = h_aggregate.plans(fold_call)
    weights = grad_weight_plans(projection(call, "residual")) if "grad_weight" in call.wanted else (None,)
    merges = _merges(call) if "grad_residual" in call.wanted else (None,)
    controller = _controller(call)
    tokens = None if "grad_residual" in call.wanted else _tokens(call)

    def plan(i: int) -> BackwardPlan:
        return BackwardPlan(
            fold_call, folds[i % len(folds)], controller, tokens, weights[i % len(weights)], merges[i % len(merges)]
        )

    return tuple(plan(i) for i in range(max(len(folds), len(weights), len(merges))))


def run_backward(
    call: Call,
    plan: BackwardPlan,
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    """Fill the wanted gradients. Inputs and results as in the declaration; scratch memory is allocated here."""
    residual, weight = inputs["residual"], inputs["weight"]
    rows, size, outputs = call.rows, call.size("D"), call.size("N")
    streams = inputs.get("grad_streams")

    grad_pre = _scratch(residual, rows, _STREAMS)
    h_aggregate.run(plan.fold_call, plan.fold, inputs, {"grad_pre": grad_pre}, {})

    assert isinstance(plan.controller.grid, int)
    pitch = plan.controller.grid * plan.controller.block
    grad_proj = _scratch(residual, rows, outputs) if plan.weight is not None else 0
    record = _scratch(residual, rows, _record(call)) if plan.merge is not None else 0
    chains = _scratch(residual, 2 * outputs, pitch) if _chains(call)[1] else 0
    upstream = (grad_pre, *_rows(inputs.get("grad_post"), 1), *_rows(inputs.get("grad_comb"), 2))
    saved = [part for name in ("logits", "proj", "r", "q") for part in _rows(inputs[name], 1)]
    mix = (*_rows(inputs["pre"], 1), *_rows(inputs.get("comb"), 2))
    form = (rows, _STREAMS * size, int(call.contract.endswith("-dsv4")), _rms(call))
    launch(plan.controller, *upstream, *saved, inputs["gain"], *mix, grad_proj, record, chains, pitch, *form)

    folds = (
        *(chains, pitch, *(inputs.get(f"start_{name}", 0) for name in _CHAINS)),
        *(results.get(f"grad_{name}", 0) for name in _CHAINS),
    )
    if plan.tokens is not None:
        launch(plan.tokens, *folds, rows, outputs, *plan.tokens.arguments)
    if plan.weight is not None:
        assert isinstance(grad_proj, Tensor)
        run_grad_weight(plan.weight, grad_proj, residual, inputs.get("start_weight"), results["grad_weight"])
    if plan.merge is not None:
        legs = (*_rows(residual, 2), *_rows(inputs["grad_hidden"], 1), *_rows(streams, 2), *_rows(weight, 1))
        launch(plan.merge, *legs, record, results["grad_residual"], *folds, rows, size, *plan.merge.arguments)


def _fast(call: Call) -> bool:
    return call.contract.startswith("fast")


def _rms(call: Call) -> int:
    """How the merge divides its RMS leg: by K alone under dsv4, for which a power of two has an exact reciprocal."""
    size = _STREAMS * call.size("D")
    if _fast(call):
        return _ONE_FACTOR
    return _RECIPROCAL if call.contract.endswith("-dsv4") and size & (size - 1) == 0 else _DIVISION


def _record(call: Call) -> int:
    """Floats per token that the controller leaves for the merge, as ``record.cuh`` lays them out."""
    return call.size("N") + _STREAMS + 4 + (_STREAMS**2 if call.has("grad_streams") else 0)


def _controller(call: Call) -> Launch:
    """A warp per block spreads the tokens best, and what limits a multiprocessor is shared memory; N = 4 needs none."""
    read = ("grad_post", "grad_comb", "logits", "proj", "pre", "comb")
    choices = {"VEC": _vec(call, *read), "OUTPUTS": call.size("N"), "STREAMS": int(call.has("grad_streams"))}
    block = 32 if call.size("N") == 24 else 128
    return Launch(_kernel("backward_controller", choices), -(-call.rows // block), block)


def _chains(call: Call) -> tuple[int, int]:
    """(first, count) of the chains to fold. Those of grad_gain come first, then those of grad_bias."""
    outputs, wanted = call.size("N"), [f"grad_{name}" in call.wanted for name in _CHAINS]
    return (0 if wanted[0] else outputs), sum(wanted) * outputs


def _tokens(call: Call) -> Launch | None:
    first, count = _chains(call)
    return Launch(_kernel("backward_tokens", {}), count, 32, arguments=(first,)) if count else None


def _merges(call: Call) -> tuple[Launch, ...]:
    """The blocks of a tile of columns share the tokens: best as many as fill all multiprocessors once."""
    read = ("residual", "grad_hidden", "grad_streams", "weight")
    outputs, vec = call.size("N"), _vec(call, *read) if call.size("D") % 8 == 0 else 1
    choices = {
        "VEC": vec,
        "OUTPUTS": outputs,
        "STREAMS": int(call.has("grad_streams")),
        "RMS": _rms(call),
        "G_BF16": int(call.layout("grad_hidden").dtype == "bfloat16"),
        "OUT_BF16": int(call.grad_dtype == "bfloat16"),
    }
    kernel = _kernel("backward_merge", choices)
    tiles, groups = -(-call.size("D") // _TILE), -(-call.rows // _GROUP)
    resident = _RESIDENT[outputs <= 8, vec] * call.device.multiprocessors
    shares = dict.fromkeys(
        min(groups, max(1, blocks // tiles)) for blocks in (resident, call.device.multiprocessors, 1)
    )
    first, count = _chains(call)
    chain_blocks = -(-count // (_BLOCK // 32 * tiles))
    return tuple(
        Launch(kernel, (tiles, chain_blocks + share), _BLOCK, arguments=(chain_blocks, first, count))
        for share in shares
    )


def _vec(call: Call, *names: str) -> int:
    """16-byte accesses are legal in these inputs, as far as they are there."""
    return 8 if all(call.layout(name).aligned for name in names if call.has(name)) else 1


def _kernel(entry: str, choices: dict[str, int]) -> CudaKernel:
    return CudaKernel("mhc_pre", entry, tuple(sorted(choices.items())))


def _scratch(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _rows(tensor: Tensor | None, strides: int) -> tuple[Tensor | int, ...]:
    """An input and its first strides, as a kernel takes them; zeros for one that is absent."""
    return (0,) * (1 + strides) if tensor is None else (tensor, *tensor.stride()[:strides])
