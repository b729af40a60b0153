"""CUDA backend of ``timestep_sinusoid``: which kernel runs a call, and its launch.

Floors: a row is 1 KB at 128 frequencies, so a call is an empty kernel (2.8 us on an H200) and one sine.
"""

from __future__ import annotations

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.ops.timestep_sinusoid.spec import SPEC
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

_THREADS = 128
_LANES = 256
"""Threads that share the tree of a row, where it has so many channels."""


def plans(call: Call) -> tuple[tuple[Launch, ...], ...]:
    if call.backward:
        padded = 1 << (2 * call.size("F") - 1).bit_length()
        lanes = min(padded, _LANES)
        kernel = CudaKernel("timestep_sinusoid", "backward", (("LANES", lanes), ("WIDTH", padded // lanes)))
        return ((Launch(kernel, call.rows, max(32, lanes)),),)
    kernel = CudaKernel("timestep_sinusoid", "forward", (("DTYPE", ELEMENTS[call.layout("timestep").dtype]),))
    blocks = -(-call.size("F") // _THREADS)
    return ((Launch(kernel, (call.rows, blocks), _THREADS),),)


def run(
    call: Call,
    plan: tuple[Launch, ...],
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    scalars: dict[str, float],
) -> None:
    (step,) = plan
    frequencies, half = inputs["frequencies"], call.size("F")
    if not call.backward:
        timestep = inputs["timestep"]
        launch(step, timestep, timestep.stride(0), frequencies, results["features"], half)
        return
    grad, features = inputs["grad_features"], inputs["features"]
    saved = (features, features.stride(0))
    launch(step, grad, grad.stride(0), frequencies, *saved, results["grad_timestep"], half)


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
