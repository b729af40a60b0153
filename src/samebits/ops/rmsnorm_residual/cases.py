"""Cases of ``rmsnorm_residual`` whose digests are committed."""

from samebits.verify.goldens import standard_cases

CASES = standard_cases("D")

PORTABLE = ("residual", "grad_x", "grad_gamma")
"""``rsqrt`` is the device's own, so y and rstd are not; given rstd, the backward uses only IEEE operations."""
