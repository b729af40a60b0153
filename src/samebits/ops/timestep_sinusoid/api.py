"""Public functions of ``timestep_sinusoid``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from samebits.ops.timestep_sinusoid.frequencies import frequencies
from samebits.registry import operator

_OP = operator("timestep_sinusoid")
_MOST_CHANNELS = 2 * max(most for axis, _, most in _OP.spec.size_limits if axis == "F")


def timestep_sinusoid(
    timestep: Tensor, num_channels: int = 256, *, contract: str | None = None, backend: str | None = None
) -> Tensor:
    """Sinusoidal features of diffusion times: cos(t f_k) for all k, then sin(t f_k), with f_k = 10000 ^ (-k / half).

    Bitwise the features of ``diffusers.Timesteps(num_channels, flip_sin_to_cos=True, downscale_freq_shift=0)`` on the same
    device: the frequencies are made by the same torch operations, and sine and cosine are torch's.

    Args:
        timestep: (T,) FP32, BF16 or FP16, any stride; values from 0 to 1. t = 1 is clean; a time scaled by 1000 is refused.
        num_channels: an even number from 2 to 8192; half of them are cosines.
        contract: ``"halving"`` (default).
        backend: ``"cuda"`` or ``"reference"``; None takes the first that accepts the call.

    Returns:
        (T, num_channels) FP32, contiguous. Differentiable once; ``timestep.grad`` is rounded once to its dtype.

    Raises:
        TypeError: timestep is no floating-point tensor of those dtypes, or num_channels no integer.
        ValueError: timestep is not one-dimensional, a value is not finite or outside [0, 1], or num_channels is odd or out
            of range. Values are looked at once per tensor and version, which waits for the device, and not during graph
            capture or ``torch.compile``: there a row with such a value is NaN.

    Source: MiniMax-H3 (diffusers 0.42.1), ``time_proj``.
    """
    if isinstance(num_channels, bool) or not isinstance(num_channels, (int, torch.SymInt)):
        raise TypeError(f"timestep_sinusoid: num_channels must be an integer, not {num_channels!r}")
    if num_channels % 2 or not 2 <= num_channels <= _MOST_CHANNELS:
        accepted = f"must be an even number from 2 to {_MOST_CHANNELS}"
        raise ValueError(f"timestep_sinusoid: num_channels = {num_channels} {accepted}")
    if not isinstance(timestep, Tensor):
        raise TypeError(f"timestep_sinusoid: timestep must be a torch.Tensor, not {type(timestep).__name__}")
    if timestep.dim() != 1:
        raise ValueError(f"timestep_sinusoid: timestep has shape {tuple(timestep.shape)}, expected (T,)")
    if timestep.is_floating_point():  # any other dtype is refused by the operator, with a better message
        _need_unit_interval(timestep)
    (features,) = _OP.forward(timestep, frequencies(timestep, num_channels), contract=contract, backend=backend)
    return features


def timestep_sinusoid_backward(
    grad_features: Tensor,
    frequencies: Tensor,
    features: Tensor,
    *,
    contract: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """The explicit backward of :func:`timestep_sinusoid`.

    Args:
        grad_features: (..., C) FP32.
        frequencies: (C / 2,) FP32, those of the forward.
        features: (..., C) FP32, what the forward returned.

    Returns:
        grad_timestep (...) FP32.
    """
    (grad_timestep,) = _OP.backward(grad_features, frequencies, features, contract=contract, backend=backend)
    assert grad_timestep is not None
    return grad_timestep


_checked: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The version at which a tensor was last found to be good."""


def _need_unit_interval(timestep: Tensor) -> None:
    """ValueError where a value is not in [0, 1]. One host synchronisation, once per tensor and version."""
    if torch.compiler.is_compiling() or type(timestep.detach()) is not Tensor or timestep.device.type == "meta":
        return
    if timestep.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    version = None if timestep.is_inference() else timestep._version
    if version is not None and _checked.get(timestep) == version:
        return
    values = timestep.detach()
    inside = (values >= 0) & (values <= 1)  # NaN is not
    if not bool(inside.all()):
        worst = values[~inside][0].item()
        raise ValueError(
            f"timestep_sinusoid: timestep has the value {worst:g}; every value must be finite and lie in [0, 1] "
            "(a time that was multiplied by 1000 has to be divided again)"
        )
    if version is not None:
        _checked[timestep] = version
