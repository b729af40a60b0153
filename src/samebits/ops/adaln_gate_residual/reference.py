"""Defines the bits of ``adaln_gate_residual``. One FP32 rounding per written operation, then one to the dtype of the rows."""

from __future__ import annotations

from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import segment_sums
from samebits.ops.rmsnorm_modulated.reference import segments_of


def forward(residual: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """rd(residual + rd(gate * y)), all three (T, H)."""
    gated = (gate.float() * y.float()).to(y.dtype)
    return (residual.float() + gated.float()).to(residual.dtype)


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    y, index = inputs["y"], inputs["index"]
    segment_sums.check_index(index, call.size("R"), f"{call.op}: index")
    gate = inputs["gate"][index.clamp(0, call.size("R") - 1)]  # on a GPU nothing above has waited for the check
    if not call.backward:
        results["out"].copy_(forward(inputs["residual"], y, gate))
        return
    upstream = inputs["grad_out"].float()
    if "grad_y" in results:
        results["grad_y"].copy_(upstream * gate.float())
    if "grad_gate" in results:
        order, bounds = segments_of(inputs, call.size("R"), call.op)
        results["grad_gate"].copy_(segment_sums.segment_sums(upstream * y.float(), order, bounds))
