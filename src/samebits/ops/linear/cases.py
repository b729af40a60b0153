"""Cases of ``linear`` whose digests are committed. Two axes are free: N and K."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS


def _sizes(n: int, k: int) -> tuple[tuple[str, int], ...]:
    return (("N", n), ("K", k))


CASES = (
    Case("t3_n40_128", 3, _sizes(40, 128)),
    Case("t7_n18_17", 7, _sizes(18, 17)),
    Case("t2_n1_1", 2, _sizes(1, 1)),
    Case("t1_n24_5376", 1, _sizes(24, 5376)),
    Case("t4_n1100_24", 4, _sizes(1100, 24)),
    Case("t33_n40_136_other_seed", 33, _sizes(40, 136), seed=1),
    Case("t9_n40_136_second_dtypes", 9, _sizes(40, 136), second_dtypes=True),
    Case("t19_n40_136_bfloat16_gradients", 19, _sizes(40, 136), grad_dtype="bfloat16"),
    *(Case(f"t4_n24_264_{p}", 4, _sizes(24, 264), pattern=p) for p in PATTERNS if p != "normal"),
    Case("t1_n24_264_tiny", 1, _sizes(24, 264), pattern="tiny"),  # no ordinary row beside it
)

TINY = {"x": (0, -124), "grad_y": (-124,)}
"""Every other column of x is ordinary, so that not all of a row underflows in its products with the weight."""

PORTABLE = ("grad_bias",)
"""A fold of the upstream gradient alone; everything else goes through a tensor core."""

FLUSHING_SHOWS = ("grad_bias",)
"""Where a machine that flushes subnormals gives other digests."""
