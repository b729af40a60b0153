"""The seven stages of the conditioning chain, in order: the one table of what each reads, promises and may be off by.

A stage is named like the operator that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.models.minimax_h3.chain import EVERYWHERE, NOWHERE, ON_CUDA, Arguments, Chain, History, Stage
from samebits.models.minimax_h3.geometry import CHUNKS, MODALITIES, Geometry
from samebits.models.minimax_h3.layouts import SYNTHETIC, timesteps
from samebits.models.minimax_h3.weights import Weights


@dataclass(frozen=True)
class Case:
    """The inputs of one run of the chain, on one device."""

    weights: Weights
    timestep: Tensor
    """(T,) FP32 in [0, 1]."""
    timestep_indices: Tensor
    """(S,) int64."""
    index: Tensor
    """(S,) int64: the row of the modulation table, timestep index * 3 + token tag."""
    hidden: Tensor
    """(1, S, H) in the model's dtype: a stand-in for what enters block 0."""
    sublayer: Tensor
    """(1, S, H): a stand-in for what attention returns."""

    @property
    def geometry(self) -> Geometry:
        return self.weights.geometry

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype


def make_case(weights: Weights, num_timesteps: int, seq_len: int, seed: int = 0, layout: str = "interleaved") -> Case:
    """A case on the device of ``weights``; what is random comes from torch's CPU generator.

    Raises:
        ValueError: the layout has no such name, or cannot have that many timesteps in so few rows.
    """
    if layout not in SYNTHETIC:
        raise ValueError(f"layout {layout!r}: choose one of {', '.join(SYNTHETIC)}")
    indices, tags = SYNTHETIC[layout](seq_len, num_timesteps, seed)
    weight = weights["norm_out.norm.weight"]
    device, shape = weight.device, (1, seq_len, weights.geometry.hidden_size)

    def rows(offset: int, factor: float) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + offset))
        return (factor * drawn).to(device, weight.dtype)

    return Case(
        weights=weights,
        timestep=timesteps(num_timesteps, seed).to(device),
        timestep_indices=indices.to(device),
        index=(indices * MODALITIES + tags).to(device),
        hidden=rows(2, 1.0),
        sublayer=rows(3, 3.0),
    )


def chunk(history: History, position: int) -> Tensor:
    """(3T, H): one of the six chunks of the modulation table, a view with row stride 6H."""
    return _table(history).chunk(CHUNKS, -1)[position]


def _table(history: History) -> Tensor:
    table = history["adaln_projection"][0]
    return table.view(MODALITIES * table.shape[0], -1)


TIME_EMBEDDER = tuple(f"time_embedder.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias"))
PROJECTION = tuple(f"transformer_blocks.0.adaln_proj.linear.{kind}" for kind in ("weight", "bias"))
LEAVES = TIME_EMBEDDER + PROJECTION
"""Parameters whose gradients the backward replay compares; it ends at the gather."""


def _sinusoid(case: Case, history: History) -> Arguments:
    return {"timestep": case.timestep, "num_channels": case.geometry.time_channels}


def _mlp(case: Case, history: History) -> Arguments:
    names = ("w1", "b1", "w2", "b2")
    leaves = {name: case.weights[key] for name, key in zip(names, TIME_EMBEDDER, strict=True)}
    return {"x": history["timestep_sinusoid"][0], **leaves}


def _projection(case: Case, history: History) -> Arguments:
    weight, bias = (case.weights[key] for key in PROJECTION)
    return {"temb": history["timestep_mlp"][0], "weight": weight, "bias": bias}


def _gather(case: Case, history: History) -> Arguments:
    return {"table": _table(history), "index": case.index}


def _norm(case: Case, history: History) -> Arguments:
    tables = {"shift": chunk(history, 0), "scale": chunk(history, 1)}
    weight = case.weights["transformer_blocks.0.norm1.weight"]
    return {"x": case.hidden, "weight": weight, **tables, "index": case.index}


def _gate(case: Case, history: History) -> Arguments:
    return {"residual": case.hidden, "y": case.sublayer, "gate": chunk(history, 2), "index": case.index}


def _final(case: Case, history: History) -> Arguments:
    return {
        "x": history["adaln_gate_residual"][0],
        "norm_weight": case.weights["norm_out.norm.weight"],
        "temb": history["timestep_mlp"][0],
        "weight": case.weights["norm_out.linear.weight"],
        "bias": case.weights["norm_out.linear.bias"],
        "timestep_indices": case.timestep_indices,
    }


# A library's GEMM has an order of its own, so the stages with a projection cannot have the peer's bits. Those that repeat
# the arithmetic of torch's CUDA kernels (the norm's sum of squares, the device's exp and cos) have them on CUDA alone.
STAGES = (
    Stage("timestep_sinusoid", _sinusoid, {"timestep": 0}, 0, ON_CUDA, "elementwise"),
    Stage("timestep_mlp", _mlp, {"x": 0}, 0, NOWHERE, "reduction"),
    Stage("adaln_projection", _projection, {"temb": 0}, 0, NOWHERE, "reduction"),
    Stage("adaln_row_gather", _gather, {"index": 0}, 0, EVERYWHERE, "reduction"),
    Stage("rmsnorm_modulated", _norm, {"x": 1, "index": 0}, 1, ON_CUDA, "reduction", narrow=("shift", "scale")),
    Stage("adaln_gate_residual", _gate, {"residual": 1, "y": 1, "index": 0}, 1, EVERYWHERE, "reduction", narrow=("gate",)),
    Stage(
        "final_adaln_out", _final, {"x": 1, "timestep_indices": 0}, 1, NOWHERE, "reduction",
        narrow=("temb",), index="timestep_indices",
    ),
)  # fmt: skip
FUSED = "adaln_modulation"
"""Projection and gather as one node, whose backward keeps the table's gradient in FP32: a mode of the backward replay."""
CONDITIONING = Chain("conditioning", STAGES, lambda ours, peers: ours.within, (FUSED,))
