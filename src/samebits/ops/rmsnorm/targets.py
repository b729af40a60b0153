"""Speed targets of ``rmsnorm`` on an H200. An empty kernel takes about 2.8 us there."""

from samebits.bench.targets import Target

_H = (("H", 5376),)

TARGETS = (
    Target("fwd", _H, (32768, None), "copy_fraction", at_least=0.85),
    Target("bwd", _H, (131072, 131072), "us", at_most=2000.0),
)
