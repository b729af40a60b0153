"""Which placements of tokens, hidden columns and controllers keep the bytes, and why the others are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samebits import registry
from samebits.dispatch import UnsupportedError


@dataclass(frozen=True)
class Placement:
    """How the tensors of a layer are spread over the ranks of one group."""

    tokens: Literal["replicated", "contiguous", "zigzag", "strided"] = "replicated"
    """``contiguous`` and ``zigzag`` as in :class:`TokenOrder`; ``strided``: token t on rank t mod n."""
    hidden: Literal["whole", "sharded"] = "whole"
    """Whether a rank holds all D columns of the tokens that it holds."""
    controller: Literal["replicated", "sharded"] = "replicated"
    """Whether a rank holds the whole controller weight."""
    parameter_gradients: Literal["carried", "summed"] = "carried"
    """``carried``: one fold over all tokens; ``summed``: an all-reduce of each rank's own fold."""


def require(op: str, placement: Placement) -> None:
    """Refuse a placement under which ``op`` would not give the bytes of one rank.

    Raises:
        UnsupportedError: with the reason and the nearest placement that keeps the bytes.
    """
    spec = registry.spec(op)
    folds = any(not result.rows for result in spec.backward.results)
    over_columns = sorted({r.over for c in spec.contracts for r in c.reductions} & {"D", "K"})
    if placement.hidden == "sharded" and over_columns:
        raise UnsupportedError(
            f"{op} sums over {' and '.join(over_columns)}: partial sums of hidden shards are other bits; gather the columns "
            "first (samebits.parallel.gather_hidden)"
        )
    if placement.controller == "sharded" and any(arg.name == "weight" for arg in spec.forward.inputs):
        raise UnsupportedError(
            f"{op}: a sharded controller sums partial projections, which is other bits; replicate it"
        )
    if not folds or placement.tokens == "replicated":
        if folds and placement.parameter_gradients == "summed":
            raise UnsupportedError(
                f"{op}: ranks that hold the same tokens have the same gradient; summing it multiplies it by their number"
            )
        return
    if placement.tokens == "strided":
        raise UnsupportedError(
            f"{op}: a fold over tokens that alternate between ranks would travel once per token; hold contiguous tokens "
            "(or zigzag chunks)"
        )
    if placement.parameter_gradients == "summed":
        raise UnsupportedError(
            f"{op}: a sum of the ranks' own folds is other bits than one fold over all tokens; carry it "
            "(samebits.parallel.token_sharded_backward)"
        )
