"""Whether a GPU can run our kernel of the digest, and runs it right."""

from __future__ import annotations

import functools
import warnings

import torch

from samebits.runtime import device as machine
from samebits.verify.trace import digest, vectors
from samebits.verify.trace.digest import CHUNK, FAN_IN, LAST

LEAST_ARCH = 80


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether this device runs the kernel, and gives the digests of ``digest.py`` for what is tried once. Waits for the device.

    Where a GPU does not, tensors are read by torch's operations instead, several times more slowly, and a warning says so.
    """
    if device.type != "cuda":
        return False
    why = machine.missing("cuda")
    if why is None and machine.info(device).arch < LEAST_ARCH:
        why = f"{machine.info(device).name} is older than compute capability 8.0"
    if why is None:
        try:
            why = _difference(device)
        except Exception as error:  # no compiler, a driver that is too old, no memory: the run must go on
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if why is not None:
        warnings.warn(f"samebits.trace: digests on {device} are made slowly, by torch: {why}", stacklevel=2)
    return why is None


def _difference(device: torch.device) -> str | None:
    """Where kernel and definition differ, over parts of each kind, aligned and not, in one launch."""
    with digest._plain(device):
        values = (torch.arange(LAST * FAN_IN * CHUNK + 4099, device=device) * 2654435761 >> 13).to(torch.int8)
        tried = (
            values,
            values[: LAST * CHUNK + 77],
            values[3:5000],
            values[: 16 * CHUNK].view(-1, 4 * CHUNK)[:, :CHUNK],
            values[: 16 * CHUNK].view(-1, 256)[:, 16:64],
        )
        memories = vectors.Memories()
        jobs = [job for job, _, _ in (vectors.jobs(tensor, vectors.Vectors()) for tensor in tried) if job is not None]
        memories.launch(jobs)
        memories.finish()
        for tensor, job in zip(tried, jobs, strict=True):
            expected, _, _ = digest.vectors(tensor)
            if not torch.equal(job.into.value, expected):
                return f"the kernel gives other sums for {tensor.numel()} bytes"
    return None
