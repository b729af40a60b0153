"""Cases of ``timestep_sinusoid`` whose digests are committed."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS


def _f(count: int) -> tuple[tuple[str, int], ...]:
    return (("F", count),)


CASES = (
    Case("t4_128", 4, _f(128)),
    Case("t7_17", 7, _f(17)),
    Case("t2_1", 2, _f(1)),
    Case("t3_4096", 3, _f(4096)),
    Case("t33_160_other_seed", 33, _f(160), seed=1),
    Case("t16_48_second_dtypes", 16, _f(48), second_dtypes=True),
    *(Case(f"t8_128_{p}", 8, _f(128), pattern=p) for p in PATTERNS if p != "normal"),
)

TINY = {"timestep": (0,), "grad_features": (-124,)}
"""Ordinary times under small gradients, whose products with sines and frequencies are subnormal."""

PORTABLE = ("grad_timestep",)
"""Sine and cosine are the device's own; given them, the backward uses only IEEE operations."""
