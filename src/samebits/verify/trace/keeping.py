"""Full tensors beside the trace, in safetensors files of bounded size."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 1 << 30
"""Host memory that kept tensors may take before they are written."""


class Kept:
    """Copies of tensors as they were. Each copy waits for the device: this is the slow, thorough way to record."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        """Of the trace; None keeps everything in memory."""
        self.files: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self._bytes = 0
        if path is not None:
            import safetensors  # noqa: F401 - missing, it must be said before the run, not behind it

    def refuses(self, dtype: torch.dtype) -> str | None:
        """Why tensors of this dtype cannot be kept, or None."""
        return None if self.path is None or _is_known(dtype) else f"not kept: safetensors has no {dtype}"

    def add(self, name: str, tensor: Tensor) -> None:
        with torch.no_grad(), torch.inference_mode(False):
            copy = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
        self.tensors[name] = copy
        self._bytes += copy.numel() * copy.element_size()
        if self.path is not None and self._bytes > SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory to the next file. In-memory traces keep it."""
        if self.path is None or not self.tensors:
            return
        from safetensors.torch import save_file

        name = f"{self.path.name}.{len(self.files)}.safetensors"
        save_file(self.tensors, self.path.with_name(name))
        self.files.append(name)
        self.tensors, self._bytes = {}, 0


@functools.cache
def _is_known(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        save({"tried": torch.empty(0, dtype=dtype)})
    except Exception:  # whatever it raises for a dtype that it does not know
        return False
    return True
