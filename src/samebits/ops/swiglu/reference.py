"""Defines the bits of ``swiglu``. One FP32 rounding per written operation, then one to the dtype of the rows where ``rd`` says.

``exp`` is the device's own; ``samebits.bits_of`` gives a CPU that of a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import elementary
from samebits.exact.fma import fma


def forward(x: Tensor) -> Tensor:
    """x [T, 2, F], value and gate, to rd(value * rd(silu(gate))) [T, F]."""
    value, gate = x.unbind(1)
    return (value.float() * _gate(gate)).to(x.dtype)


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """grad [T, F] and x [T, 2, F] to the gradients of value and gate [T, 2, F]."""
    value, gate = x.unbind(1)
    upstream = grad.float()
    grad_value = (upstream * _gate(gate)).to(x.dtype)
    grad_silu = (upstream * value.float()).to(x.dtype)
    return torch.stack((grad_value, silu_gradient(grad_silu, gate)), 1)


def silu(gate: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) in FP32, then rounded to the dtype of the gate."""
    wide = gate.float()
    return (wide / (1 + elementary.exp(-wide))).to(gate.dtype)


def silu_gradient(grad: Tensor, gate: Tensor) -> Tensor:
    """(grad * s) * fma(gate, 1 - s, 1) in FP32 with s = 1 / (1 + exp(-gate)), then rounded to the dtype of the gate."""
    wide = gate.float()
    one = torch.ones_like(wide)
    s = one / (1 + elementary.exp(-wide))
    return ((grad.float() * s) * fma(wide, 1 - s, one)).to(gate.dtype)


def _gate(gate: Tensor) -> Tensor:
    return silu(gate).float()


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    if call.backward:
        results["grad_x"].copy_(backward(inputs["grad_y"], inputs["x"]))
    else:
        results["y"].copy_(forward(inputs["x"]))
