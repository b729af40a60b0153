"""Cases of ``mhc_pre`` whose digests are committed."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS

CASES = (
    Case("t7_17", 7, (("D", 17),)),
    Case("t2_1", 2, (("D", 1),)),
    Case("t5_128", 5, (("D", 128),)),
    Case("t1_4096", 1, (("D", 4096),)),
    Case("t3_40_other_seed", 3, (("D", 40),), seed=1),
    Case("t5_40_second_dtypes", 5, (("D", 40),), second_dtypes=True),
    Case("t5_40_bfloat16_gradients", 5, (("D", 40),), grad_dtype="bfloat16"),
    *(Case(f"t4_72_{p}", 4, (("D", 72),), pattern=p) for p in PATTERNS if p != "normal"),
)

PORTABLE = ("q",)
"""The square root, the mean and the sum of squares are IEEE operations in a fixed order under every contract. Everything
behind r, the sigmoid or the softmax is the device's own, and proj is a tensor core's under two contracts."""
