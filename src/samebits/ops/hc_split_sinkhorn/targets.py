"""Speed targets of ``hc_split_sinkhorn`` on an H200: what the README counts in instructions, plus an empty kernel (2.8 us) and
one trip to memory."""

from samebits.bench.targets import Target

TARGETS = (
    Target("fwd", (), (1, 1), "us", at_most=6.5),
    Target("fwd", (), (4096, 4096), "us", at_most=7.5),
    Target("fwd", (), (32768, 32768), "us", at_most=11),
    Target("fwd", (), (131072, 131072), "us", at_most=26),
    Target("bwd", (), (1, 1), "us", at_most=12),
    Target("bwd", (), (32768, 32768), "us", at_most=24),
    Target("bwd", (), (131072, 131072), "us", at_most=80),
)
