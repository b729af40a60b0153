"""The tensors of a case: drawn once, shared by every candidate and peer of one measurement."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.bench.case import Case, upstream_dtype
from samebits.checks import DTYPES
from samebits.contract import OpSpec, TensorArg
from samebits.verify.operators import derived


def forward_inputs(spec: OpSpec, case: Case, device: torch.device, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    given = [arg for arg in spec.forward.inputs if not arg.derived]
    known = {arg.name: _draw(spec, case, arg, arg.dtypes[0], generator) for arg in given}
    known |= derived(spec, spec.forward, known, spec.complete(dict(case.sizes)))
    return {arg.name: known[arg.name] for arg in spec.forward.inputs}


def upstream(spec: OpSpec, case: Case, device: torch.device, seed: int = 2) -> dict[str, Tensor]:
    """The gradients that come from above, by the name of the backward input, optional ones too; no starts, no further legs."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        arg.name: _draw(spec, case, arg, upstream_dtype(spec, case, arg), generator)
        for arg in spec.backward.inputs
        if arg.name.startswith("grad_") and arg not in spec.beside()
    }


def _draw(spec: OpSpec, case: Case, arg: TensorArg, dtype: str, generator: torch.Generator) -> Tensor:
    """Random, never constant: zeros run faster than data and hide unwritten outputs."""
    shape, kind = case.extent(spec, arg), DTYPES[dtype]
    if arg.below:
        below = spec.complete(dict(case.sizes))[arg.below]
        return torch.randint(below, shape, generator=generator, device=generator.device, dtype=kind)
    if arg.sample in ("positive", "unit"):
        least = 0.0625 if arg.sample == "positive" else 0.0
        return torch.rand(shape, generator=generator, device=generator.device, dtype=kind).add_(least)
    normal = torch.randn(shape, generator=generator, device=generator.device, dtype=kind)
    if arg.sample == "small":
        return normal.mul_(2.0**-6)
    return normal.mul_(0.5).add_(1.0) if arg.sample == "weight" else normal
