"""Cases of ``mhc_post`` whose digests are committed. All of its results are portable."""

from samebits.verify.goldens import standard_cases

CASES = standard_cases("D")
