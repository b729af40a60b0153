"""Cases of ``rmsnorm`` whose digests are committed."""

from samebits.verify.goldens import standard_cases

CASES = standard_cases("H")

TINY = {"x": (0, -124), "grad_y": (-124,)}
"""Every other column of x is ordinary, so that eps does not swallow the row and the products with small gradients are
subnormal; the columns between make y subnormal."""

PORTABLE = ("grad_x", "grad_weight")
"""``rsqrt`` is the device's own, so y and rstd are not; given rstd, the backward uses only IEEE operations."""

FLUSHING_SHOWS = ("grad_x", "grad_weight")
"""Where a machine that flushes subnormals gives other digests, in some case."""
