"""Cases of ``timestep_mlp`` whose digests are committed. Three axes are free: K, F and D."""

from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS


def _sizes(k: int, f: int, d: int) -> tuple[tuple[str, int], ...]:
    return (("K", k), ("F", f), ("D", d))


CASES = (
    Case("t4_256_168_84", 4, _sizes(256, 168, 84)),
    Case("t3_17_19_23", 3, _sizes(17, 19, 23)),
    Case("t2_1_1_1", 2, _sizes(1, 1, 1)),
    Case("t1_640_132_70", 1, _sizes(640, 132, 70)),
    Case("t33_24_40_8_other_seed", 33, _sizes(24, 40, 8), seed=1),
    *(Case(f"t4_136_40_24_{p}", 4, _sizes(136, 40, 24), pattern=p) for p in PATTERNS if p != "normal"),
    # One row, because ordinary rows beside it would hide subnormals in a gradient that sums over rows.
    Case("t1_136_40_24_tiny", 1, _sizes(136, 40, 24), pattern="tiny"),
)

TINY = {"x": (0, -124), "grad_y": (-124,)}
"""Every other feature is ordinary, so that pre is not only the bias; small gradients give subnormal products."""

PORTABLE = ("pre", "grad_w2", "grad_b2")
"""``exp`` is the device's own, so what is behind the SiLU and its gradient is not portable."""

FLUSHING_SHOWS = ("grad_w2", "grad_b2")
"""Results that tell when a machine flushes subnormals; in the others the biases and long sums swallow it."""
