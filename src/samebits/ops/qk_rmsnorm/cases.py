"""Cases of ``qk_rmsnorm`` whose digests are committed."""

from dataclasses import replace

from samebits.ops.rope_3axis.cases import SHAPES
from samebits.verify.goldens import Case

CASES = (
    *(replace(case, sizes=case.sizes[:2]) for case in SHAPES),
    Case("t300_2_40", 300, (("N", 2), ("D", 40))),  # more than one tile, and one that begins inside a position
)

TINY = {"x": (0, -124), "grad_y": (-124,)}
"""As for ``rmsnorm``."""

PORTABLE = ("grad_x", "grad_weight")
"""``rsqrt`` is the device's own, so y and rstd are not; given rstd, the backward uses only IEEE operations."""

FLUSHING_SHOWS = ("grad_x", "grad_weight")
"""Where a machine that flushes subnormals gives other digests, in some case."""
