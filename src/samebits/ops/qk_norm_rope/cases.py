"""Cases of ``qk_norm_rope`` whose digests are committed."""

from samebits.ops.qk_rmsnorm.cases import FLUSHING_SHOWS, PORTABLE
from samebits.ops.rope_3axis.cases import SHAPES
from samebits.verify.goldens import Case

__all__ = ["CASES", "FLUSHING_SHOWS", "PORTABLE", "TINY"]

CASES = (
    *SHAPES,
    Case("t300_2_40_36", 300, (("N", 2), ("D", 40), ("R", 36))),  # more than one tile; halves that are no whole vectors
)

TINY = {"x": (0, -124), "grad_y": (-124,), "cos": (0,), "sin": (0,)}
"""As for ``rmsnorm`` and ``rope_3axis``."""
