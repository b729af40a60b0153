"""Cases of ``swiglu`` whose digests are committed."""

from samebits.verify.goldens import standard_cases

CASES = standard_cases("F")

TINY = {"x": (-124, 0, 0), "grad_y": (0, -124)}
"""So that products are subnormal; no column has a small value and a small gate, whose product is zero."""
