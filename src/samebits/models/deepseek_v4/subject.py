"""What is compared: one real decoder layer at a small size, and the hyper-connection part at the official size.

Every parameter is random (a weight of ones or a bias of zeros hides faults), and so are the four streams: a model's
entry makes them four copies of the embedding, for which a wrong stream order would not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known
from samebits.models.deepseek_v4.replace import SITES

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
}


@dataclass(frozen=True)
class Subject:
    """A module with the members of a decoder layer, and what it is called with."""

    title: str
    module: nn.Module
    streams: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)
    per_sequence: bool = False
    """Whether a sequence can be run alone (the whole layer), with ``kwargs`` sliced accordingly."""

    def __call__(self) -> None:
        self.module(self.streams, **self.kwargs)

    def to(self, device: torch.device) -> Subject:
        kwargs = {name: _to(value, device) for name, value in self.kwargs.items()}
        return replace(self, module=self.module.to(device), streams=self.streams.to(device), kwargs=kwargs)

    def sequence(self, index: int) -> Subject:
        """The same with one sequence of the batch."""
        one = slice(index, index + 1)
        batch = self.streams.shape[0]
        kwargs = {name: _slice(value, one, batch) for name, value in self.kwargs.items()}
        return Subject(f"{self.title}, sequence {index}", self.module, self.streams[one], kwargs, self.per_sequence)


class HyperConnectionPart(nn.Module):
    """Both sites of a decoder layer without their sublayers: hyper-connection, then norm, on the same streams."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        code = known.modeling()
        for collapse, norm in SITES:
            self.add_module(collapse, getattr(code, known.HYPER_CONNECTION)(config))
            self.add_module(norm, getattr(code, known.RMSNORM)(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, hidden_streams: Tensor) -> None:
        for collapse, norm in SITES:
            _, _, collapsed = self.get_submodule(collapse)(hidden_streams)
            self.get_submodule(norm)(collapsed)


def decoder_layer(batch: int = 2, sequence: int = 160, seed: int = 0) -> Subject:
    """One ``DeepseekV4DecoderLayer`` as a BF16 model has it: BF16 weights, FP32 where the class insists.

    160 positions are more than one compression window (128), so the attention compressor takes part. The arguments of
    the layer are the ones the class's own model passes to it.
    """
    code = known.modeling()
    generator = torch.Generator().manual_seed(seed)
    config = code.DeepseekV4Config(**SMALL)
    model = code.DeepseekV4Model(config).eval().requires_grad_(False)
    randomise(model, generator)
    strict_bfloat16(model)
    layer = model.layers[0]
    ids = torch.randint(0, config.vocab_size, (batch, sequence), generator=generator)
    kwargs = _layer_arguments(model, layer, ids)
    streams = torch.randn(batch, sequence, config.hc_mult, config.hidden_size, generator=generator).bfloat16()
    title = f"decoder layer, hidden_size {config.hidden_size}, batch {batch} x {sequence}"
    return Subject(title, layer, streams, kwargs, per_sequence=True)


def hyper_connection_part(hidden_size: int = 4096, rows: int = 32, seed: int = 0) -> Subject:
    """Both hyper-connections and both norms at an official width (default config), FP32 parameters, BF16 streams."""
    generator = torch.Generator().manual_seed(seed)
    config = known.modeling().DeepseekV4Config(hidden_size=hidden_size)
    module = HyperConnectionPart(config).eval().requires_grad_(False)
    randomise(module, generator)
    streams = torch.randn(1, rows, config.hc_mult, hidden_size, generator=generator).bfloat16()
    return Subject(f"hyper-connection part, hidden_size {hidden_size}, {rows} rows", module, streams)


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Gains around one, everything else normal with the deviation of its kind; expert tables of a hash router too."""
    for name, parameter in module.named_parameters():
        kind = name.split(".")[-1]
        noise = torch.randn(parameter.shape, generator=generator)
        if kind == "scale":
            parameter.data = 1 + 0.25 * noise
        elif parameter.dim() == 1 and kind == "weight":
            parameter.data = 1 + 0.5 * noise
        elif parameter.dim() == 1:
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5
    for name, table in module.named_buffers():
        if name.endswith("tid2eid"):
            experts = int(SMALL["n_routed_experts"])
            drawn = torch.rand(table.shape[0], experts, generator=generator).argsort(-1)
            table.copy_(drawn[:, : table.shape[1]])


def strict_bfloat16(model: nn.Module) -> None:
    """Cast to BF16 as ``from_pretrained(dtype=torch.bfloat16)`` does: not what the class's strict list keeps in FP32."""
    strict = set(model._keep_in_fp32_modules_strict)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if strict.isdisjoint(name.split(".")):
            parameter.data = parameter.data.bfloat16()


@contextmanager
def norms_cast_to_input(module: nn.Module) -> Iterator[None]:
    """Cast what each norm returns to the dtype of its input: what lets the BF16 layer of transformers 5.17 run at all."""
    norm = getattr(known.modeling(), known.RMSNORM)
    handles = [
        member.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
        for member in module.modules()
        if isinstance(member, norm)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Captured(Exception):
    pass


def _layer_arguments(model: nn.Module, layer: nn.Module, ids: Tensor) -> dict[str, Any]:
    """The keyword arguments that the model passes to a layer for these ids; the layer itself does not run."""
    captured: dict[str, Any] = {}

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.update(kwargs)
        raise _Captured

    handle = layer.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        model(ids, use_cache=False)
    except _Captured:
        pass
    finally:
        handle.remove()
    return captured


def _slice(value: Any, one: slice, batch: int) -> Any:
    if isinstance(value, dict):
        return {key: _slice(item, one, batch) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_slice(item, one, batch) for item in value)
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == batch:
        return value[one]
    return value


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value
