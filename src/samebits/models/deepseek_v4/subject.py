"""What is measured: a real ``DeepseekV4ForCausalLM``, small or with one layer of the official size.

Every parameter is random (a weight of ones or a bias of zeros hides faults), and so are the four streams that enter the
first layer: the model makes them four copies of the embedding, for which a wrong stream order would not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known
from samebits.models.deepseek_v4.patching import to_bfloat16

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "layer_types": ["compressed_sparse_attention"],
    "mlp_layer_types": ["moe"],
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
"""A layer that a CPU runs. Its attention compresses, so every kind of norm takes part."""
OFFICIAL: dict[str, Any] = {key: SMALL[key] for key in ("num_hidden_layers", "layer_types", "mlp_layer_types")}
"""One layer of DeepSeek-V4-Flash: everything else as the class's own configuration has it."""


@dataclass(frozen=True)
class Subject:
    """A model, the tokens it runs on, and the streams that enter its first layer in place of the embedding's copies."""

    title: str
    model: nn.Module
    ids: Tensor
    streams: Tensor

    def __call__(self) -> Tensor:
        """The logits (B, S, vocabulary)."""
        layer = self.model.get_submodule("model.layers.0")
        handle = layer.register_forward_pre_hook(lambda _, args: (self.streams, *args[1:]))
        try:
            logits: Tensor = self.model(self.ids, use_cache=False).logits
            return logits
        finally:
            handle.remove()

    def sequence(self, index: int) -> Subject:
        """The same with one sequence of the batch."""
        one = slice(index, index + 1)
        return replace(self, title=f"{self.title}, sequence {index}", ids=self.ids[one], streams=self.streams[one])


def causal_lm(
    batch: int = 2, sequence: int = 32, *, seed: int = 0, device: str = "cpu", config: Mapping[str, Any] = SMALL
) -> Subject:
    """A BF16 model as ``from_pretrained`` gives it: BF16 weights, FP32 where the class insists; gradients off.

    Args:
        batch, sequence: positions of a run.
        device: where everything is made; random numbers of other devices are other numbers.
        config: of ``DeepseekV4Config``.
    """
    code = known.modeling()
    settings = code.DeepseekV4Config(**config)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        model = code.DeepseekV4ForCausalLM(settings)
    model.eval().requires_grad_(False)
    randomise(model, generator)
    to_bfloat16(model)
    ids = torch.randint(0, settings.vocab_size, (batch, sequence), generator=generator, device=device)
    shape = (batch, sequence, settings.hc_mult, settings.hidden_size)
    streams = torch.randn(shape, generator=generator, device=device).bfloat16()
    layers = "layer" if settings.num_hidden_layers == 1 else "layers"
    title = f"{settings.num_hidden_layers} {layers}, hidden_size {settings.hidden_size}, batch {batch} x {sequence}"
    return Subject(title, model, ids, streams)


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Gains around one, everything else normal with the deviation of its kind; expert tables of a hash router too."""
    for name, parameter in module.named_parameters():
        kind = name.split(".")[-1]
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        if kind in ("scale", "hc_scale"):
            parameter.data = 1 + 0.25 * noise
        elif parameter.dim() == 1 and kind == "weight":
            parameter.data = 1 + 0.5 * noise
        elif parameter.dim() == 1:
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5
    for name, table in module.named_buffers():
        if name.endswith("tid2eid"):
            experts = int(module.get_submodule(name.removesuffix(".tid2eid")).num_experts)  # type: ignore[arg-type]
            drawn = torch.rand(table.shape[0], experts, generator=generator, device=table.device).argsort(-1)
            table.copy_(drawn[:, : table.shape[1]])


@contextmanager
def norms_cast_to_input(module: nn.Module) -> Iterator[None]:
    """Cast what each norm returns to the dtype of its input: what lets the BF16 model of transformers 5.17 run at all."""
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
