"""What ``linear`` should give: FP64, rounded only where the model stores a value. Judges accuracy, never bits."""

from __future__ import annotations

from torch import Tensor


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    x, bias = inputs["x"], inputs.get("bias")
    y = x.double() @ inputs["weight"].double().T
    return {"y": (y if bias is None else y + bias.double()).to(x.dtype)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    grad = inputs["grad_y"].double()
    grad_weight, grad_bias = grad.T @ inputs["x"].double(), grad.sum(0)
    for name, value in (("start_weight", grad_weight), ("start_bias", grad_bias)):
        start = inputs.get(name)
        if start is not None:
            value += start.double()
    return {"grad_x": grad @ inputs["weight"].double(), "grad_weight": grad_weight, "grad_bias": grad_bias}
