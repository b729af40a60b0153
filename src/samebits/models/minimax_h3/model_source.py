"""The whole transformer for a qualification: the real class at any width and depth, with seeded weights or released ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.exact.bits import digest
from samebits.models.minimax_h3 import known
from samebits.models.minimax_h3.geometry import OFFICIAL, Geometry, reduced
from samebits.models.minimax_h3.patching import to_bfloat16
from samebits.models.minimax_h3.subject import RELEASED, angles
from samebits.models.minimax_h3.weights import draw


@dataclass(frozen=True)
class Source:
    """A model in BF16 with its FP32 islands, on its device, and where its parameters come from."""

    model: nn.Module
    weights: str
    """The seed, or the folder, for records."""

    @property
    def sizes(self) -> str:
        config: Any = self.model.config
        return (
            f"{config.num_layers} blocks of hidden size {config.hidden_size}, {config.num_attention_heads} heads of "
            f"{config.attention_head_dim}, FFN {config.ffn_dim}, {config.num_refiner_layers} refiner blocks"
        )

    def digest(self) -> str:
        """One digest of all parameters, by name."""
        words = "\n".join(f"{name} {digest(value)}" for name, value in sorted(self.model.named_parameters()))
        return hashlib.sha256(words.encode()).hexdigest()


@dataclass(frozen=True)
class Recipe:
    """How to build a source, in words that another process understands."""

    folder: str | None = None
    """Of a checkpoint; else the parameters are synthetic."""
    seed: int = 0
    width: int = OFFICIAL.hidden_size
    blocks: int | None = 2
    device: str = "cpu"

    def build(self) -> Source:
        if self.folder is not None:
            return load(Path(self.folder), self.blocks, self.device)
        return synthetic(self.seed, reduced(self.width), 2 if self.blocks is None else self.blocks, self.device)


def config(geometry: Geometry, blocks: int) -> dict[str, Any]:
    """Arguments of the class. A reduced model has the released channels, and text about as wide as its rows."""
    refiner = RELEASED["num_refiner_layers"] if geometry.official else 1
    return RELEASED | {
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.heads,
        "attention_head_dim": geometry.head_dim,
        "ffn_dim": geometry.ffn_dim,
        "freq_dim": geometry.time_channels,
        "time_embed_hidden_dim": geometry.time_hidden,
        "time_embed_dim": geometry.time_embed,
        "rope_freq_dim": geometry.rope_frequencies,
        "text_dim": RELEASED["text_dim"] if geometry.official else geometry.hidden_size,
        "num_refiner_layers": refiner,
        "num_layers": blocks,
    }


def synthetic(seed: int, geometry: Geometry = OFFICIAL, blocks: int = 2, device: str = "cpu") -> Source:
    """Random parameters, the same bits on every machine; see ``weights.synthetic``.

    Raises:
        ValueError: no block.
        ImportError: diffusers is missing or too old.
    """
    if blocks < 1:
        raise ValueError(f"{blocks} blocks: expected at least 1")
    model = _empty(config(geometry, blocks), device)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(draw(name, value.dtype, tuple(value.shape), seed, value.device))
    return Source(model, f"synthetic, seed {seed}")


def _empty(sizes: dict[str, Any], device: str) -> nn.Module:
    with torch.device("meta"):  # what the class would draw is not wanted
        model: Any = known.home(known.MODEL).from_config(sizes)  # which leaves out what is no argument of the class
    to_bfloat16(model).to_empty(device=device)
    model.rope = angles(model, device)
    made: nn.Module = model.eval()
    return made


def load(folder: Path, blocks: int | None = None, device: str = "cpu") -> Source:
    """A checkpoint that ``save_pretrained`` or a download left in a folder: ``config.json`` and ``*.safetensors``.

    Args:
        blocks: keep only the first so many; None keeps all.

    Raises:
        FileNotFoundError: no ``config.json`` there, or a parameter is in no file.
        ValueError: fewer blocks in it than asked for, or a parameter of another shape or dtype.
        ImportError: diffusers is missing or too old.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model: {folder / 'config.json'} does not exist")
    stored = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in stored.items() if not name.startswith("_")}
    held = sizes.get("num_layers", 50)
    if blocks is not None and not 1 <= blocks <= held:
        raise ValueError(f"{blocks} blocks: the model in {folder} has 1 to {held} to choose")
    model = _empty(sizes | {"num_layers": held if blocks is None else blocks}, device)
    _fill(model, folder)
    return Source(model, f"the checkpoint in {folder}")


@torch.no_grad()
def _fill(model: nn.Module, folder: Path) -> None:
    from safetensors import safe_open

    wanted = dict(model.named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in wanted.keys() & set(file.keys()):
                value, place = file.get_tensor(name), wanted.pop(name)
                if (value.shape, value.dtype) != (place.shape, place.dtype):
                    raise ValueError(
                        f"{name} in {path.name} is {value.dtype} {tuple(value.shape)}, expected {place.dtype} "
                        f"{tuple(place.shape)}"
                    )
                place.copy_(value)
    for name in wanted:
        raise FileNotFoundError(f"{name} is in no *.safetensors of {folder}")
