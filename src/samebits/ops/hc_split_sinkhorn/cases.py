"""Cases of ``hc_split_sinkhorn`` whose digests are recorded on each architecture. All axes are fixed; ``wide`` spreads the
logits over many powers of two, ``cancelling`` over thousands. Every result rests on exp, so none is portable."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS

CASES = (
    Case("t1", 1, ()),
    Case("t16", 16, ()),
    Case("t33_other_seed", 33, (), seed=1),
    *(Case(f"t16_{pattern}", 16, (), pattern=pattern) for pattern in PATTERNS if pattern != "normal"),
)

TINY = {"logits": (0,), "grad_pre": (-124,), "grad_post": (-124,), "grad_comb": (-120,)}
"""Ordinary logits under small gradients, whose products with weights and matrices are subnormal."""
