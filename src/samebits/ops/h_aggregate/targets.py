"""Speed targets of ``h_aggregate`` on an H200. An empty kernel takes about 2.8 us there."""

from samebits.bench.targets import Target

_D = (("D", 4096),)

TARGETS = (
    Target("fwd", _D, (8192, None), "copy_fraction", at_least=0.93, measure=(8192, 65536)),
    Target("fwd", _D, (1, 1), "us", at_most=4.5),
    Target("fwd", _D, (128, 128), "us", at_most=6.3),
    Target("bwd", _D, (8192, None), "copy_fraction", at_least=0.85, measure=(8192, 65536)),
)
