"""Parameters of the conditioning chain and of block 0: the prepared ones, verified as they are loaded, or seeded synthetic ones."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.exact.bits import digest
from samebits.models.minimax_h3 import manifest as manifests
from samebits.models.minimax_h3.geometry import OFFICIAL, Geometry
from samebits.models.minimax_h3.manifest import Manifest, ManifestError
from samebits.verify import inputs

VARIABLE = "SAMEBITS_MINIMAX_H3_WEIGHTS"
"""Names the folder that ``samebits prepare minimax-h3`` wrote, where a caller names none."""
CONDITIONING_FILE = "h3_conditioning.safetensors"
BLOCK_FILE = "h3_block_0.safetensors"
METADATA = "samebits"
"""The one metadata key of a prepared file: JSON with the revision, and the digests taken when tensors were extracted
whose digest was not published. One key, because the order of several is not deterministic in the file."""


@dataclass(frozen=True)
class Weights:
    """Parameters by their name in the checkpoint."""

    source: str
    """Where they come from, for records: the revision, or the seed."""
    geometry: Geometry
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def digest(self) -> str:
        """One digest of all tensors, by name."""
        words = "\n".join(f"{name} {digest(tensor)}" for name, tensor in sorted(self.tensors.items()))
        return hashlib.sha256(words.encode()).hexdigest()

    def to(self, device: torch.device) -> Weights:
        return Weights(self.source, self.geometry, {name: t.to(device) for name, t in self.tensors.items()})


def load(folder: Path | None = None, *, block: bool = False, manifest: Manifest | None = None) -> dict[str, Tensor]:
    """The tensors of a prepared folder, every one of them verified against the manifest.

    Args:
        folder: of ``samebits prepare minimax-h3``; None takes the environment variable ``SAMEBITS_MINIMAX_H3_WEIGHTS``.
        block: the rest of block 0 in place of the conditioning tensors.

    Raises:
        FileNotFoundError: no folder is named, or the file is not in it.
        ManifestError: a tensor is missing, is none of the manifest's, or has another dtype, shape or byte.
    """
    if folder is None:
        named = os.environ.get(VARIABLE)
        if not named:
            raise FileNotFoundError(f"no weights: {VARIABLE} is not set (samebits prepare minimax-h3 --out FOLDER)")
        folder = Path(named)
    path = folder / (BLOCK_FILE if block else CONDITIONING_FILE)
    if not path.is_file():
        raise FileNotFoundError(f"no weights: {path} does not exist (samebits prepare minimax-h3 --out {folder})")
    pinned = manifest or manifests.read()
    tensors, metadata = _read(path)
    check(tensors, pinned, block)
    for name, stored in metadata.get("digests", {}).items():
        if name in tensors and digest(tensors[name]) != stored:
            raise ManifestError(f"{name}: sha256 {digest(tensors[name])}, it was {stored} when it was extracted")
    return tensors


def check(tensors: Mapping[str, Tensor], manifest: Manifest, block: bool = False) -> None:
    """Raises ManifestError unless these are all tensors of the section, and no others, bit for bit."""
    entries = manifest.section(block)
    for name in sorted(set(entries) ^ set(tensors)):
        raise ManifestError(f"{name}: {'missing' if name in entries else 'not in the manifest'}")
    for name, entry in entries.items():
        entry.check(name, tensors[name])


def prepared(folder: Path | None = None, *, block: bool = False) -> Weights:
    """The released parameters, from a prepared folder; see :func:`load`. ``block``: the rest of block 0 too."""
    pinned = manifests.read()
    tensors = load(folder, manifest=pinned)
    if block:
        tensors = tensors | load(folder, block=True, manifest=pinned)
    return Weights(f"{pinned.repository} {pinned.revision[:12]}", OFFICIAL, tensors)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            own = (file.metadata() or {}).get(METADATA, "{}")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(own)  # noqa: SIM118
    except SafetensorError as error:
        raise ManifestError(f"{path.name}: not a safetensors file: {error}") from error


# --- synthetic --------------------------------------------------------------------------------------------------------

_WORDS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""How many numbers are drawn at a time: what a cache holds, or what fills a GPU."""


def synthetic(
    seed: int, geometry: Geometry = OFFICIAL, *, block: bool = False, device: torch.device | None = None
) -> Weights:
    """Random parameters that are the same bits on every machine; ``block``: those of block 0 in place of the chain's.

    Gains lie around one, biases around zero with deviation 1/4, and a weight has about the deviation K^-1/2 that keeps a
    row's size, as a power of two.
    """
    shapes = geometry.block_shapes() if block else geometry.shapes()
    where = device or torch.device("cpu")
    tensors = {name: draw(name, dtype, shape, seed, where) for name, (dtype, shape) in shapes.items()}
    return Weights(f"synthetic, seed {seed}", geometry, tensors)


def draw(name: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """One parameter of :func:`synthetic`, by its name in the checkpoint."""
    stream = f"minimax_h3/{name}"
    if len(shape) == 1:
        if name.endswith("weight"):
            return inputs.parameter_tensor(stream, shape, dtype, seed, "weight").to(device)
        return (inputs.parameter_tensor(stream, shape, dtype, seed) * 0.25).to(device)
    rows, width = shape
    made = torch.empty(shape, dtype=dtype, device=device)
    step = max(1, _WORDS[device.type] // width)
    for start in range(0, rows, step):
        chosen = range(start, min(start + step, rows))
        drawn = np.stack([inputs.words(seed, stream, row, width) for row in chosen])
        made[start : chosen.stop] = _normal(torch.from_numpy(drawn.view(np.int64)).to(device))
    return made.mul_(2.0 ** -round(math.log2(width) / 2))


def _normal(words: Tensor) -> Tensor:
    """``inputs.draw("normal", ...)`` of many rows at once: whole numbers, then FP32, which has their 21 bits."""
    lanes = 0x0000FFFF0000FFFF
    pairs = (words >> 16).bitwise_and_(lanes).add_(words & lanes)
    total = (pairs >> 32).add_(pairs.bitwise_and_(0xFFFFFFFF))
    return total.sub_(131070).float().mul_(7 * 2.0**-18)
