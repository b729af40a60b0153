"""Forms of the operators for tokens, or hidden columns, that are spread over ranks: the same bytes as one rank gives.

What is local to a token needs nothing: any split of the tokens gives the same bytes. A gradient of a parameter is one left
fold over all tokens, so the ranks continue it one after another (:func:`token_sharded_backward`, or
:class:`RankChain` around modules). Sums of partial results
are never taken: they are other bits.
"""

from samebits.parallel.carry import carry
from samebits.parallel.chain import RankChain
from samebits.parallel.gradients import token_sharded_backward
from samebits.parallel.hidden import gather_hidden
from samebits.parallel.order import Chunk, TokenOrder
from samebits.parallel.placement import Placement, require
from samebits.parallel.replicas import require_same_on_all_ranks

__all__ = [
    "Chunk",
    "Placement",
    "RankChain",
    "TokenOrder",
    "carry",
    "gather_hidden",
    "require",
    "require_same_on_all_ranks",
    "token_sharded_backward",
]
