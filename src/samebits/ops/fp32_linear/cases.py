"""Cases of ``fp32_linear`` whose digests are committed. Two axes are free: N and K."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS


def _sizes(n: int, k: int) -> tuple[tuple[str, int], ...]:
    return (("N", n), ("K", k))


CASES = (
    Case("t4_168_96", 4, _sizes(168, 96)),
    Case("t5_96_1344", 5, _sizes(96, 1344)),
    Case("t3_19_17", 3, _sizes(19, 17)),
    Case("t2_1_1", 2, _sizes(1, 1)),
    Case("t33_40_24_other_seed", 33, _sizes(40, 24), seed=1),
    *(Case(f"t4_40_136_{p}", 4, _sizes(40, 136), pattern=p) for p in PATTERNS if p != "normal"),
    # One row, because ordinary rows beside it would hide subnormals in a gradient that sums over rows.
    Case("t1_40_136_tiny", 1, _sizes(40, 136), pattern="tiny"),
)

TINY = {"x": (0, -124), "grad_y": (-124,)}
"""Every other feature is ordinary, so that y is not only the bias; small gradients give subnormal products."""

FLUSHING_SHOWS = ("grad_x", "grad_weight", "grad_bias")
"""Results that tell when a machine flushes subnormals; in y the bias swallows it."""
