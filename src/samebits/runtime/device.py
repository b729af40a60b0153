"""What dispatch needs to know about the machine: asked once per device, of the device the tensor is on."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from samebits.dispatch import DeviceInfo


@functools.cache
def info(device: torch.device) -> DeviceInfo:
    if device.type != "cuda":
        return DeviceInfo(device.type)
    props = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        kind="cuda",
        arch=props.major * 10 + props.minor,
        multiprocessors=props.multi_processor_count,
        name=props.name,
        shared_bytes=getattr(props, "shared_memory_per_block_optin", 99 * 1024),
    )


def current_device() -> int:
    """As torch.cuda.current_device, for callers that hold a CUDA tensor: nothing is left to initialise then."""
    index: int = torch._C._cuda_getDevice()
    return index


H200 = DeviceInfo("cuda", 90, 132, "NVIDIA H200", 232448)
"""For asking, on any machine, what would run there."""


@functools.cache
def missing(backend: str) -> str | None:
    """Why a backend cannot be imported here, or None. The message says what to install."""
    if backend == "cuda":
        for module in ("cuda.core", "cuda.bindings"):
            if not _importable(module):
                return f"module {module!r} is not installed: pip install 'samebits[cuda]'"
    if backend == "triton":
        if not _importable("triton"):
            return "module 'triton' is not installed: pip install 'samebits[triton]'"
        for variable in ("TRITON_INTERPRET", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT"):
            if os.environ.get(variable):
                return f"{variable} is set, and the bits of Triton under it are not proven; unset it"
    return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
