"""Block 0 as seventeen nodes: the one table of what each reads, which operator runs it, what it promises.

To let another callable run a node, bind it by the node's name; to let another operator run it, change its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import samebits
from samebits.models.minimax_h3.chain import EVERYWHERE, NOWHERE, ON_CUDA, Arguments, Chain, History, Stage
from samebits.models.minimax_h3.geometry import MODALITIES, Geometry
from samebits.models.minimax_h3.layouts import named
from samebits.models.minimax_h3.measure import Error
from samebits.models.minimax_h3.stages import PROJECTION, TIME_EMBEDDER, chunk
from samebits.models.minimax_h3.weights import Weights
from samebits.ops.rope_3axis.tables import rope_3axis_tables

PREFIX = "transformer_blocks.0."
ERROR_FACTOR, ERROR_SLACK = 1.25, 1e-3
"""A node's relative error may be this many times the peer's, plus this."""


@dataclass(frozen=True)
class BlockCase:
    """The inputs of the block for one packed layout, on one device."""

    weights: Weights
    layout: str
    timestep: Tensor
    """(T,) FP32, the distinct ones."""
    index: Tensor
    """(S,) int64: the row of the modulation table, timestep index * 3 + token tag."""
    cos: Tensor
    """(S, R) FP32, as ``sin``: of the angles of each position, three axes, twice."""
    sin: Tensor
    hidden: Tensor
    """(1, S, H) in the model's dtype: a stand-in for what enters block 0."""
    temb: Tensor
    """(T, D) FP32: what our timestep embedder makes of ``timestep``, since a library's FP32 product is another on each machine."""

    @property
    def geometry(self) -> Geometry:
        return self.weights.geometry

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def parameter(self, name: str) -> Tensor:
        """Of the block, by its name in it."""
        return self.weights[PREFIX + name]


@torch.no_grad()
def make_block_case(weights: Weights, layout: str, seed: int = 0) -> BlockCase:
    """A named layout on the device of ``weights``; the hidden rows come from torch's CPU generator.

    Raises:
        ValueError: no layout has that name.
    """
    packed, timestep, timestep_indices = named(layout)
    gain = weights[PREFIX + "norm1.weight"]
    geometry, device = weights.geometry, gain.device
    timestep = timestep.to(device)
    features = samebits.timestep_sinusoid(timestep, geometry.time_channels)
    cos, sin = rope_3axis_tables(packed.position_ids.to(device), frequencies=geometry.rope_frequencies)
    drawn = torch.randn(1, len(packed), geometry.hidden_size, generator=torch.Generator().manual_seed(seed + 2))
    return BlockCase(
        weights=weights,
        layout=layout,
        timestep=timestep,
        index=(timestep_indices * MODALITIES + packed.token_tags).to(device),
        cos=cos,
        sin=sin,
        hidden=drawn.to(device, gain.dtype),
        temb=samebits.timestep_mlp(features, *(weights[name] for name in TIME_EMBEDDER)),
    )


# --- what a node is called with ---------------------------------------------------------------------------------------

Reader = Callable[[BlockCase, History], Arguments]


def _projection(case: BlockCase, history: History) -> Arguments:
    weight, bias = (case.weights[name] for name in PROJECTION)
    return {"temb": case.temb, "weight": weight, "bias": bias}


def _hidden(case: BlockCase, history: History, source: str) -> Tensor:
    return history[source][0] if source else case.hidden


def _norm(source: str, name: str, shift: int) -> Reader:
    """RMSNorm of the residual stream (the case's hidden rows where ``source`` is empty), modulated by two chunks."""

    def read(case: BlockCase, history: History) -> Arguments:
        tables = {"shift": chunk(history, shift), "scale": chunk(history, shift + 1)}
        return {
            "x": _hidden(case, history, source),
            "weight": case.parameter(name),
            **tables,
            "index": case.index,
        }

    return read


def _linear(source: str, name: str, flatten: bool = False) -> Reader:
    def read(case: BlockCase, history: History) -> Arguments:
        (x,) = history[source]
        return {"x": x.flatten(2) if flatten else x, "weight": case.parameter(name)}

    return read


def _by_head(case: BlockCase, history: History, source: str) -> Tensor:
    """(B, S, heads, head_dim)."""
    return history[source][0].unflatten(-1, (case.geometry.heads, -1))


def _head_norm(source: str, name: str) -> Reader:
    return lambda case, history: {"x": _by_head(case, history, source), "weight": case.parameter(name)}


def _rope(source: str) -> Reader:
    return lambda case, history: {"x": history[source][0], "cos": case.cos, "sin": case.sin}


def _attention(case: BlockCase, history: History) -> Arguments:
    return {"q": history["rope_q"][0], "k": history["rope_k"][0], "v": _by_head(case, history, "v_proj")}


def _swiglu(case: BlockCase, history: History) -> Arguments:
    return {"x": history["ffn_gate_up"][0]}


def _residual(source: str, sublayer: str, gate: int) -> Reader:
    def read(case: BlockCase, history: History) -> Arguments:
        return {
            "residual": _hidden(case, history, source),
            "y": history[sublayer][0],
            "gate": chunk(history, gate),
            "index": case.index,
        }

    return read


# --- the nodes --------------------------------------------------------------------------------------------------------


def _modulated_norm(name: str, read: Reader) -> Stage:
    return Stage(
        name, read, {"x": 1, "index": 0}, 1, ON_CUDA, "reduction",
        operator="rmsnorm_modulated", narrow=("shift", "scale"), batch=("x",),
    )  # fmt: skip


def _product(name: str, read: Reader) -> Stage:
    """Its sums have the order of a library's GEMM only where that library does not split them: measured, not promised."""
    return Stage(name, read, {"x": 1}, 1, NOWHERE, "reduction", operator="linear", batch=("x",))


def _normed_heads(name: str, read: Reader) -> Stage:
    return Stage(name, read, {"x": 1}, 1, ON_CUDA, "reduction", operator="qk_rmsnorm", batch=("x",))


def _rotated(name: str, read: Reader) -> Stage:
    axes = {"x": 1, "cos": 0, "sin": 0}
    return Stage(name, read, axes, 1, EVERYWHERE, "elementwise", operator="rope_3axis", batch=("x",))


def _gated(name: str, read: Reader) -> Stage:
    return Stage(
        name, read, {"residual": 1, "y": 1, "index": 0}, 1, EVERYWHERE, "elementwise",
        operator="adaln_gate_residual", narrow=("gate",), batch=("residual", "y"),
    )  # fmt: skip


NODES = (
    Stage("adaln_projection", _projection, {"temb": 0}, 0, NOWHERE, "reduction", operator="adaln_projection"),
    _modulated_norm("norm1", _norm("", "norm1.weight", 0)),
    _product("q_proj", _linear("norm1", "attn.to_q.weight")),
    _product("k_proj", _linear("norm1", "attn.to_k.weight")),
    _product("v_proj", _linear("norm1", "attn.to_v.weight")),
    _normed_heads("q_norm", _head_norm("q_proj", "attn.norm_q.weight")),
    _normed_heads("k_norm", _head_norm("k_proj", "attn.norm_k.weight")),
    _rotated("rope_q", _rope("q_norm")),
    _rotated("rope_k", _rope("k_norm")),
    # a row alone is one query with all the keys; of our two outputs the second is the logarithm of the sum
    Stage(
        "attention", _attention, {"q": 1}, 1, NOWHERE, "reduction",
        operator="attention", batch=("q", "k", "v"), keep=1,
    ),
    _product("o_proj", _linear("attention", "attn.to_out.0.weight", flatten=True)),
    _gated("residual_attn", _residual("", "o_proj", 2)),
    _modulated_norm("norm2", _norm("residual_attn", "norm2.weight", 3)),
    _product("ffn_gate_up", _linear("norm2", "ff.net.0.proj.weight")),
    Stage("swiglu", _swiglu, {"x": 1}, 1, ON_CUDA, "elementwise", operator="swiglu", batch=("x",)),
    _product("ffn_down", _linear("swiglu", "ff.net.2.weight")),
    _gated("residual_mlp", _residual("residual_attn", "ffn_down", 5)),
)  # fmt: skip
OUTPUT = "residual_mlp"
CONSTANTS = ("index", "cos", "sin")
"""Arguments that no gradient reaches."""


def close(ours: Error, peers: Error) -> bool:
    """Not further from the golden than the peer, within the margin for one rounding falling the other way."""
    if ours.relative is None:
        return False
    return peers.relative is None or ours.relative <= ERROR_FACTOR * peers.relative + ERROR_SLACK


BLOCK = Chain("block", NODES, close)
