"""Inputs that are the same bits on every machine: dyadic numbers from the integer generator of ``samebits.verify``.

A token depends on its id and the width only, so cases of one width share their tokens, and any batch can be recomposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.accept.batch import Batch, Weights
from samebits.accept.contract import LayerContract
from samebits.verify import inputs


def batch(rows: int, contract: LayerContract, padding: Sequence[int] = ()) -> Batch:
    """``rows`` tokens with ids 0, 1, ..., and among them, at the indices ``padding``, rows of zeros everywhere."""
    hidden = contract.hidden

    def drawn(name: str, *shape: int, exponent: int = 0) -> Tensor:
        values = inputs.row_tensor(_stream(name, hidden), range(rows), shape, torch.float32)
        return (values * 2.0**exponent).bfloat16()

    def shared(name: str, *shape: int, sample: str = "normal", exponent: int = 0) -> Tensor:
        values = inputs.parameter_tensor(_stream(name, hidden), shape, torch.float32, sample=sample)
        return values * 2.0**exponent  # exact

    weights = Weights(
        controller=shared("controller", contract.controller_n, contract.controller_k, sample="small"),
        alpha_pre=shared("alpha_pre", 1, exponent=-1),
        alpha_post=shared("alpha_post", 1, exponent=-1),
        alpha_res=shared("alpha_res", 1, exponent=-1),
        bias=shared("bias", contract.controller_n, exponent=-3),
        gamma=shared("gamma", hidden, sample="weight"),
    )
    return Batch(
        contract=contract,
        weights=weights,
        token_id=_with_zeros(torch.arange(1, rows + 1), padding),
        r_old=_with_zeros(drawn("r_old", 4, hidden), padding),
        y=_with_zeros(drawn("y", hidden), padding),
        d_r_new=_with_zeros(drawn("d_r_new", 4, hidden), padding),
        d_normalized=_with_zeros(drawn("d_normalized", hidden), padding),
        d_residual=_with_zeros(drawn("d_residual", hidden, exponent=-2), padding),
    ).sealed()


def _stream(name: str, hidden: int) -> str:
    return f"accept/deepseek-v4/{hidden}/{name}"


def _with_zeros(tokens: Tensor, padding: Sequence[int]) -> Tensor:
    """The tokens in order, with a zero at each of these indices of the result."""
    total = tokens.shape[0] + len(padding)
    taken = [index for index in range(total) if index not in padding]
    padded = tokens.new_zeros((total, *tokens.shape[1:]))
    padded[taken] = tokens
    return padded
