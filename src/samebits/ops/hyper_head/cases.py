"""Cases of ``hyper_head`` whose digests are committed."""

from samebits.ops.mhc_pre.cases import CASES as CASES

PORTABLE = ("q",)
"""As in mhc_pre."""
