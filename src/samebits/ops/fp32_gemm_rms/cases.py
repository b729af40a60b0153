"""Cases of ``fp32_gemm_rms`` whose digests are committed. Two axes are free: N and K."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS


def _sizes(n: int, k: int) -> tuple[tuple[str, int], ...]:
    return (("N", n), ("K", k))


CASES = (
    Case("t16_n24_512", 16, _sizes(24, 512)),
    Case("t7_n24_17", 7, _sizes(24, 17)),
    Case("t2_n1_1", 2, _sizes(1, 1)),
    Case("t5_n4_512", 5, _sizes(4, 512)),
    Case("t3_n31_264", 3, _sizes(31, 264)),
    Case("t1_n24_16384", 1, _sizes(24, 16384)),
    Case("t1_n24_28672", 1, _sizes(24, 28672)),
    Case("t300_n24_40_other_seed", 300, _sizes(24, 40), seed=1),
    Case("t300_n24_40_started", 300, _sizes(24, 40), started=True),
    Case("t6_n24_136_second_dtypes", 6, _sizes(24, 136), second_dtypes=True),
    Case("t6_n24_136_bfloat16_gradients", 6, _sizes(24, 136), grad_dtype="bfloat16"),
    *(Case(f"t6_n24_520_{p}", 6, _sizes(24, 520), pattern=p) for p in PATTERNS if p != "normal"),
    # One row, because ordinary rows beside it would hide subnormals in a gradient that sums over rows.
    Case("t1_n4_520_tiny", 1, _sizes(4, 520), pattern="tiny"),
)

FLUSHING_SHOWS = ("q", "grad_weight")
"""Results that tell when a machine flushes subnormals; in the others eps, long sums or chains in FP64 swallow it."""

PORTABLE = ("q", "grad_x")
"""Sums of squares, their mean or root, and grad_x are IEEE operations in a fixed order under every contract. ``rsqrt`` is the
device's own, and proj and grad_weight are a tensor core's under two contracts."""
