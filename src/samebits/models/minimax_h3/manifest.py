"""What the pinned checkpoint must be: files and tensors by SHA-256. ``manifest.json`` holds the published values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.exact.bits import digest


class ManifestError(ValueError):
    """A file or tensor is not the one that the manifest names."""


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    size: int | None
    """Bytes; None where it was not published."""

    def check(self, name: str, path: Path) -> None:
        """Raises ManifestError unless the file at ``path`` is this one."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            raise ManifestError(f"{name}: {size} bytes, the manifest has {self.size}")
        found = file_digest(path)
        if found != self.sha256:
            raise ManifestError(f"{name}: sha256 {found}, the manifest has {self.sha256}")


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    sha256: str | None
    """Of the raw little-endian bytes; None where it was not published, and then the hash of the shard vouches for it."""

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ManifestError unless dtype, shape and every byte are those of the manifest."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if dtype != self.dtype:
            raise ManifestError(f"{name}: dtype {dtype}, the manifest has {self.dtype}")
        if shape != self.shape:
            raise ManifestError(f"{name}: shape {shape}, the manifest has {self.shape}")
        if self.sha256 is None:
            return
        found = digest(tensor)
        if found != self.sha256:
            raise ManifestError(f"{name}: sha256 {found}, the manifest has {self.sha256}")


@dataclass(frozen=True)
class Manifest:
    name: str
    repository: str
    revision: str
    subfolder: str
    architecture: str
    index: str
    """The file that maps tensor names to shards."""
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    block_tensors: dict[str, TensorEntry]
    """The rest of block 0, kept in a file of its own."""

    def section(self, block: bool) -> dict[str, TensorEntry]:
        return self.block_tensors if block else self.tensors


def read(path: Path | None = None) -> Manifest:
    """The manifest of the package, or the one at ``path`` (in the same form)."""
    text = path.read_text() if path is not None else (files(__package__) / "manifest.json").read_text()
    return parse(json.loads(text))


def parse(content: dict[str, Any]) -> Manifest:
    words = {key: content[key] for key in ("name", "repository", "revision", "subfolder", "architecture", "index")}
    return Manifest(
        **words,
        files={name: FileEntry(entry["sha256"], entry["bytes"]) for name, entry in content["files"].items()},
        tensors=_section(content["tensors"]),
        block_tensors=_section(content["block_tensors"]),
    )


def _section(entries: dict[str, dict[str, Any]]) -> dict[str, TensorEntry]:
    return {name: _tensor(name, entry) for name, entry in entries.items()}


def _tensor(name: str, entry: dict[str, Any]) -> TensorEntry:
    if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
        raise ValueError(f"manifest: {name} has an unknown dtype {entry['dtype']!r}")
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), entry["sha256"])


def file_digest(path: Path) -> str:
    """SHA-256 of a file that need not fit in memory."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()
