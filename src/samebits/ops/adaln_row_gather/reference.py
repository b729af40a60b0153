"""Defines the bits of ``adaln_row_gather``: copies forward, sums in tiles of 256 positions backward. Runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.exact import segment_sums
from samebits.ops.adaln_row_gather.spec import CHUNKS
from samebits.ops.rmsnorm_modulated.reference import segments_of


def plans(call: Call) -> tuple[None, ...]:
    return (None,)


def run(
    call: Call, plan: None, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    table, index = inputs["table"], inputs["index"]
    segment_sums.check_index(index, call.size("R"), f"{call.op}: index")
    if not call.backward:
        here = index.clamp(0, call.size("R") - 1)  # on a GPU nothing above has waited for the check
        for at, name in enumerate(CHUNKS):
            torch.index_select(table[:, at], 0, here, out=results[name])
        return
    if "grad_table" in results:
        order, bounds = segments_of(inputs, call.size("R"), call.op)
        for at, name in enumerate(CHUNKS):
            upstream = inputs.get(f"grad_{name}")
            if upstream is None:
                results["grad_table"][:, at] = 0.0
            else:
                results["grad_table"][:, at] = segment_sums.segment_sums(upstream.float(), order, bounds)
