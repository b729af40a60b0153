"""Cases of ``rope_3axis`` whose digests are committed."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS

HEADS = (("N", 3), ("D", 128), ("R", 96))
SHAPES = (
    Case("t5_56_128_96", 5, (("N", 56), ("D", 128), ("R", 96))),
    Case("t7_3_64_64", 7, (("N", 3), ("D", 64), ("R", 64))),
    Case("t3_2_256_96", 3, (("N", 2), ("D", 256), ("R", 96))),
    Case("t4_1_17_6", 4, (("N", 1), ("D", 17), ("R", 6))),
    Case("t9_3_24_12_other_seed", 9, (("N", 3), ("D", 24), ("R", 12)), seed=1),
    Case("t5_3_128_second_dtypes", 5, HEADS, second_dtypes=True),
    Case("t5_3_128_bfloat16_gradients", 5, HEADS, grad_dtype="bfloat16"),
    *(Case(f"t6_3_128_{p}", 6, HEADS, pattern=p) for p in PATTERNS if p != "normal"),
    # One position, because ordinary ones beside it would hide subnormals in a gradient that sums over positions.
    Case("t1_3_128_tiny", 1, HEADS, pattern="tiny"),
)
CASES = SHAPES

TINY = {"x": (-124,), "grad_y": (-124,), "cos": (0,), "sin": (0,)}
"""So that products with the angles are subnormal."""
