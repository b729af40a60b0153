"""Speed targets of ``fp32_gemm_rms`` on an H200: the ascending contracts against their own floor, the chain of K additions.

Nobody publishes a time for this operator alone under these contracts; the published ones are those of ``mhc_pre``.
"""

from samebits.bench.targets import Target

_K = (("N", 24), ("K", 16384))
_ASCENDING = ("ascending", "ascending-dsv4")

TARGETS = (
    Target("fwd", _K, (1, 1), "us", at_most=42.0, contracts=_ASCENDING),
    Target("fwd", _K, (128, 128), "us", at_most=45.0, contracts=_ASCENDING),
    Target("fwd", _K, (4096, 4096), "us", at_most=200.0, contracts=_ASCENDING),
)
