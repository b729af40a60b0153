"""The real block of diffusers with our operators patched in, run whole: it must be what its nodes are one by one."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from samebits.models.minimax_h3 import patching, peer
from samebits.models.minimax_h3.block import OUTPUT, BlockCase
from samebits.models.minimax_h3.block_backward import Runner
from samebits.models.minimax_h3.block_peer import build_block
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.chain import History


def patched_runner(case: BlockCase, candidate: Candidate) -> Runner | None:
    """Runs the patched block as a case asks; None where the nodes are not all our operators, of one contract each,
    or there is no diffusers."""
    names = candidate.chain.names
    if peer.missing() or not all(candidate.is_operator(name) for name in names):
        return None
    contracts: dict[str, str] = {}
    for name in names:
        operator, contract = candidate.chain.operator(name), candidate.contract(name)
        if contracts.setdefault(operator, contract) != contract:
            return None
    block = build_block(case.geometry).to(case.dtype)
    here = {operator: contract for operator, contract in contracts.items() if operator in patching.OPERATORS}
    patching.patch(block, here, backend=candidate.backend)
    return lambda given: _run(block, given)


def _run(block: nn.Module, case: BlockCase) -> History:
    parameters = {name: case.parameter(name) for name, _ in block.named_parameters()}
    inputs = (case.hidden, case.temb, case.index, (case.cos, case.sin))
    made: torch.Tensor = functional_call(block, parameters, inputs, strict=True)
    return {OUTPUT: (made,)}
