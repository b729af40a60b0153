"""The real block of diffusers, run whole: what it made at every node, caught on its way.

Most nodes are calls of its submodules, which hooks see. Rotation and attention are functions that its attention processor
calls: the arguments of the latter are what the former returned, so that one is watched in the module for the time of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call

from samebits.models.minimax_h3.block import BlockCase
from samebits.models.minimax_h3.chain import History
from samebits.models.minimax_h3.geometry import EPS, Geometry
from samebits.models.minimax_h3.peer import modeling

RETURNED = {
    "adaln_projection": "adaln_proj.linear",
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "q_norm": "attn.norm_q",
    "k_norm": "attn.norm_k",
    "o_proj": "attn.to_out.0",
    "ffn_gate_up": "ff.net.0.proj",
    "ffn_down": "ff.net.2",
    "residual_mlp": "",
}
"""Node to the submodule that returns it."""
TAKEN = {"norm1": "attn", "residual_attn": "norm2", "norm2": "ff", "swiglu": "ff.net.2"}
"""Node to the submodule that takes it; between them are lines of the block's own forward."""


def build_block(geometry: Geometry) -> nn.Module:
    """A block without memory, on the meta device."""
    with torch.device("meta"):
        made: nn.Module = modeling().MiniMaxH3TransformerBlock(
            hidden_size=geometry.hidden_size,
            num_attention_heads=geometry.heads,
            attention_head_dim=geometry.head_dim,
            ffn_dim=geometry.ffn_dim,
            time_embed_dim=geometry.time_embed,
            norm_eps=EPS,
            qk_norm_eps=EPS,
        )
    return made.eval()


@functools.cache
def block_module(geometry: Geometry) -> nn.Module:
    return build_block(geometry)


def whole(case: BlockCase) -> History:
    """What the block makes of the case, node by node, part of one autograd graph."""
    block = block_module(case.geometry)
    parameters = {name: case.parameter(name) for name, _ in block.named_parameters()}
    with _caught(block) as found:
        functional_call(block, parameters, (case.hidden, case.temb, case.index, (case.cos, case.sin)), strict=True)
    return {name: (value,) for name, value in found.items()}


@contextmanager
def _caught(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    found: dict[str, Tensor] = {}

    def returned(name: str) -> Any:
        return lambda module, given, made: found.__setitem__(name, made)

    def taken(name: str) -> Any:
        return lambda module, given: found.__setitem__(name, given[0])

    handles = [block.get_submodule(path).register_forward_hook(returned(name)) for name, path in RETURNED.items()]
    handles += [block.get_submodule(path).register_forward_pre_hook(taken(name)) for name, path in TAKEN.items()]
    attend = modeling().dispatch_attention_fn

    def watched(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        made: Tensor = attend(query, key, *rest, **options)
        found.update(rope_q=query, rope_k=key, attention=made)
        return made

    try:
        with mock.patch.object(modeling(), "dispatch_attention_fn", watched):
            yield found
    finally:
        for handle in handles:
            handle.remove()
