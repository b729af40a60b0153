"""Gradients of the conditioning stages: embedder, projection and gather, six upstream gradients to six parameters.

Three modes: *separate* operators, the *fused* node, whose table gradient is never rounded, and the *peer*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.dispatch import UnsupportedError
from samebits.models.minimax_h3 import golden
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.chain import History, Implementation, Outputs, StageError, call
from samebits.models.minimax_h3.geometry import CHUNKS
from samebits.models.minimax_h3.measure import Agreement, agreement, error, repeats
from samebits.models.minimax_h3.stages import FUSED, LEAVES, PROJECTION, STAGES, Case
from samebits.verify.tolerance import tolerance

SEPARATE, FUSED_MODE, PEER = "separate", "fused", "peer"
CHAIN = STAGES[:4]
"""Up to and with the gather."""


@dataclass(frozen=True)
class LeafResult:
    """One mode's gradient of one parameter, against the golden."""

    repeat: bool
    max_abs: float | None
    relative: float | None
    """max_abs over the golden's largest magnitude."""
    correctly_rounded: float
    """Share of elements that are the golden rounded to the dtype."""


@dataclass(frozen=True)
class Leaf:
    name: str
    dtype: str
    golden_absmax: float
    modes: dict[str, LeafResult]


@dataclass(frozen=True)
class Gradients:
    leaves: tuple[Leaf, ...]
    fused_forward: Agreement
    """What the fused node returned beside what the separate operators returned."""
    owners: dict[str, str]
    """Mode to what ran it."""
    stand_ins: tuple[str, ...]
    """Modes in which the eager provider was bound to a stage: nothing is promised of them."""


def gradients(case: Case, candidate: Candidate, theirs: Implementation, seed: int) -> Gradients:
    """Every mode twice. Upstream gradients are random, from a generator of the case's device."""
    device, shape = case.hidden.device, (len(case.index), case.geometry.hidden_size)
    generator = torch.Generator(device).manual_seed(seed + 1)
    upstream = [torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(CHUNKS)]
    modes: dict[str, tuple[Implementation, bool]] = {
        SEPARATE: (candidate, False),
        FUSED_MODE: (candidate, True),
        PEER: (theirs, False),
    }
    outputs, runs = {}, {}
    for mode, (implementation, fused) in modes.items():
        try:
            outputs[mode], first = _run(case, implementation, fused, upstream)
            runs[mode] = (first, _run(case, implementation, fused, upstream)[1])
        except (StageError, UnsupportedError):
            raise
        except Exception as error:
            raise StageError(f"gradients, {mode}: {type(error).__name__}: {error}") from error
    forward = agreement(outputs[FUSED_MODE], outputs[SEPARATE])
    del outputs
    judge = golden.Golden(case.dtype)
    _, true = _run(case, lambda name: getattr(judge, name), False, upstream, exact=True)
    leaves = []
    for position, name in enumerate(LEAVES):
        found = {mode: (first[position], second[position]) for mode, (first, second) in runs.items()}
        leaves.append(_leaf(name, found, true[position]))
    stages = {SEPARATE: [stage.name for stage in CHAIN], FUSED_MODE: [CHAIN[0].name, CHAIN[1].name, FUSED]}
    return Gradients(
        leaves=tuple(leaves),
        fused_forward=forward,
        owners={mode: ", ".join(candidate.owner(name) for name in names) for mode, names in stages.items()},
        stand_ins=tuple(mode for mode, names in stages.items() if any(candidate.is_stand_in(name) for name in names)),
    )


def _run(
    case: Case, implementation: Implementation, fused: bool, upstream: list[Tensor], exact: bool = False
) -> tuple[Outputs, Outputs]:
    """The six outputs, and the gradients of ``LEAVES`` in their dtype, or in FP64 for the golden."""
    leaves = {name: case.weights[name].detach() for name in LEAVES}
    leaves = {name: (leaf.double() if exact else leaf.clone()).requires_grad_() for name, leaf in leaves.items()}
    given = _with_leaves(case, leaves)
    history: History = {}
    for stage in CHAIN[:2] if fused else CHAIN:
        history[stage.name] = stage.run(implementation, stage.arguments(given, history))
    if fused:
        weight, bias = (leaves[name] for name in PROJECTION)
        (temb,) = history["timestep_mlp"]
        outputs = call(FUSED, implementation, {"temb": temb, "weight": weight, "bias": bias, "index": case.index})
    else:
        outputs = history["adaln_row_gather"]
    grads = [grad.to(output.dtype) for output, grad in zip(outputs, upstream, strict=True)]
    found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return tuple(output.detach() for output in outputs), found


def _with_leaves(case: Case, leaves: dict[str, Tensor]) -> Case:
    weights = replace(case.weights, tensors={**case.weights.tensors, **leaves})
    return replace(case, weights=weights)


def _leaf(name: str, runs: dict[str, tuple[Tensor, Tensor]], true: Tensor) -> Leaf:
    dtype = next(iter(runs.values()))[0].dtype
    limit = tolerance("reduction", dtype, gradient=True)
    modes = {}
    for mode, (first, second) in runs.items():
        off = error((first,), (true,), limit)
        modes[mode] = LeafResult(repeats((first,), (second,)), off.max_abs, off.relative, off.correctly_rounded)
    return Leaf(name, str(dtype).removeprefix("torch."), float(true.abs().max()), modes)
